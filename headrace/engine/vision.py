"""Loads the vision encoder of a model, where it has one that is wanted."""

from __future__ import annotations

import dataclasses

from headrace.config import Decision, EngineConfig
from headrace.engine.timeline import Timeline
from headrace.models.vision import VisionEncoder
from headrace.sources.files import ModelFiles


def load_vision(files: ModelFiles, config: EngineConfig, timeline: Timeline) -> tuple[VisionEncoder | None, str]:
    """Loads the encoder of a multimodal model.

    Returns:
        The encoder, or None: the model reads text alone, or prompts bring features. And the reason.

    Raises:
        ConfigError: the checkpoint lacks weights of the encoder.
    """
    if config.model.vision is None:
        return None, ""
    reason = "asked for (mm_encoder none)" if config.args.mm_encoder == "none" else ""
    counts = config.args.limit_mm_per_prompt
    if not reason and not counts.image and not counts.video:
        reason = "prompts have no pictures and no videos (limit_mm_per_prompt)"
    encoder: VisionEncoder | None = None
    if not reason:
        # Imports transformers, which text does without.
        from headrace.models.vision_encoder import load_encoder

        with timeline.phase("vision encoder") as phase:
            encoder = load_encoder(files, config.model.vision, config.dtype, config.device, config.args.seed)
            phase.detail = "none" if encoder is None else f"{encoder.nbytes:,} bytes"
        reason = "" if encoder is not None else "the checkpoint has no weights of it"
    if encoder is None:
        return None, reason
    return encoder, f"the vision part of {config.model.vision.model_type}"


def with_vision(config: EngineConfig, encoder: VisionEncoder | None, reason: str) -> EngineConfig:
    """The configuration of an engine with what ``load_vision`` returned."""
    if config.model.vision is None:
        return config
    decision = Decision("vision encoder", "none" if encoder is None else "transformers", reason)
    scheduler = config.scheduler
    if encoder is None:
        scheduler = dataclasses.replace(scheduler, max_num_encoder_tokens=0)
    return dataclasses.replace(config, scheduler=scheduler, decisions=(*config.decisions, decision))
