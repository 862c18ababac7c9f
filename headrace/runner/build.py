"""Assembly of a runner from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.attention.backend import AttentionBackend, LayerCache
from headrace.attention.select import create_for, modes_of
from headrace.cache.blocks import ArenaBlocks
from headrace.cache.planes import allocate
from headrace.config import EngineConfig
from headrace.models.adapters import adapter_targets
from headrace.models.interface import Model
from headrace.models.vision.interface import VisionEncoder
from headrace.runner.inputs import ForwardPass, StepBuffers
from headrace.runner.part import RunnerPart
from headrace.runner.parts.adapters import AdapterTables
from headrace.runner.parts.attention import AttentionWatch
from headrace.runner.parts.experts import ExpertRecorder
from headrace.runner.parts.media import MediaTables
from headrace.runner.parts.pieces import NoPieces, Pieces
from headrace.runner.parts.record import Recorder
from headrace.runner.parts.sparse import SparseTables
from headrace.runner.parts.states import StateTables


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


def make_parts(
    config: EngineConfig,
    model: Model,
    encoder: VisionEncoder | None,
    blocks: ArenaBlocks | None,
    buffers: StepBuffers,
    backends: Sequence[AttentionBackend],
) -> list[RunnerPart]:
    """Returns the optional subsystems that the configuration needs.

    Raises:
        ConfigError: the record cannot be written.
    """
    device = torch.device(config.device)
    parts: list[RunnerPart] = [AttentionWatch(backends, device)]
    if config.args.record_steps is not None:
        parts.append(Recorder(config.args.record_steps, config))
    if config.cache.states is not None and blocks is not None:
        slots, by_token = config.scheduler.max_num_seqs, config.args.deterministic
        parts.append(StateTables(config.cache, config.cache.states, blocks, slots, device, by_token=by_token))
    if config.experts is not None and isinstance(model, nn.Module):
        parts.append(ExpertRecorder(model, config.experts, config, buffers))
    if config.sparse is not None:
        parts.append(SparseTables(config, config.sparse, device, model.group))
    if (targets := adapter_targets(model)) is not None:
        slots, dtype = config.scheduler.max_num_seqs, getattr(torch, config.dtype)
        parts.append(AdapterTables(targets, slots, config.scheduler.max_loras, dtype, device))
    if config.model.vision is not None:
        slots, dtype, kept = config.scheduler.max_num_seqs, getattr(torch, config.dtype), config.args.mm_encoder_cache_bytes
        parts.append(MediaTables(config.model, config.model.vision, encoder, slots, dtype, device, kept))
    return parts


def add_pieces(
    config: EngineConfig, model: Model, forward: ForwardPass, buffers: StepBuffers, parts: list[RunnerPart]
) -> Pieces | NoPieces:
    """Returns what computes prompts by layers: for a model with routers one more of the parts."""
    if config.sparse is None or not config.sparse.routed:
        return NoPieces()
    (tables,) = (part for part in parts if isinstance(part, SparseTables))
    pieces = Pieces(model, forward, buffers, tables)
    parts.append(pieces)
    return pieces
