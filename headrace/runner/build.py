"""What a runner is made of, as its configuration says."""

from __future__ import annotations

import torch

from headrace.attention.backend import AttentionBackend, LayerCache
from headrace.attention.select import create_for, modes_of
from headrace.cache.planes import allocate
from headrace.config import EngineConfig
from headrace.models.vision.interface import VisionEncoder
from headrace.runner.media import MediaTables
from headrace.runner.record import Recorder


def make_caches(config: EngineConfig) -> list[LayerCache]:
    """The KV of each layer, allocated. Raises ConfigError where the cache's dtype does not fit."""
    return allocate(config.cache, config.model, config.device, config.cache.dtype)


def make_backends(config: EngineConfig) -> list[AttentionBackend]:
    """The attention of each layer. Raises ConfigError for an unknown name."""
    return create_for(
        config.model.layers,
        config.attention_backends,
        config.device,
        config.dtype,
        config.sparse,
        kv_dtype=config.cache.dtype,
        modes=modes_of(config.model),
    )


def make_media(config: EngineConfig, encoder: VisionEncoder | None) -> MediaTables | None:
    """Items of the slots' sequences; None: the model reads text alone."""
    if config.model.vision is None:
        return None
    return MediaTables(
        config.model,
        encoder,
        config.scheduler.max_num_seqs,
        getattr(torch, config.dtype),
        torch.device(config.device),
        config.args.mm_encoder_cache_bytes,
    )


def make_recorder(config: EngineConfig) -> Recorder | None:
    """Raises ConfigError if the record cannot be written."""
    path = config.args.record_steps
    return None if path is None else Recorder(path, config)
