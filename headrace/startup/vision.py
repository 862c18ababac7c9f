"""Loads the vision encoder of a model, where it has one that is wanted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from headrace.config import Decision, EngineConfig
from headrace.core.media import ItemInputs
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError, import_reason
from headrace.models.vision.interface import CALL_ROWS, VisionEncoder
from headrace.sources.files import ModelFiles

_USUAL_SIDE, _LARGE_SIDE, _LEAST_SIDE = 1024, 4096, 32
"""Pixels."""


def encoder_loader() -> Callable[..., VisionEncoder | None]:
    """``load_encoder``. Imports transformers' models, which text does without.

    Raises:
        ConfigError: they cannot be imported.
    """
    try:
        from headrace.models.vision.encoder import load_encoder
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported: {import_reason(error)}") from error
    return load_encoder


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
    if config.model.vision.features_only:
        reason = f"audio clips of {config.model.vision.model_type} are taken as features alone"
    counts = config.args.limit_mm_per_prompt
    if not reason and not counts.image and not counts.video:
        reason = "prompts have no pictures and no videos (limit_mm_per_prompt)"
    encoder: VisionEncoder | None = None
    if not reason:
        load_encoder = encoder_loader()
        with timeline.phase("vision encoder") as phase:
            encoder = load_encoder(
                files,
                config.model.vision,
                config.dtype,
                config.device,
                config.args.seed,
                one_by_one=config.args.deterministic,
            )
            phase.detail = "none" if encoder is None else f"{encoder.nbytes:,} bytes"
        reason = "" if encoder is not None else "the checkpoint has no weights of it"
    if encoder is None:
        return None, reason
    return encoder, f"the vision part of {config.model.vision.model_type}"


def encoder_calls(files: ModelFiles, config: EngineConfig, encoder: VisionEncoder | None) -> list[Callable[[], object]]:
    """The calls of the encoder that take most memory: as many pictures as it encodes at once, and the largest one that the
    processor makes. Empty: nothing is encoded here."""
    if encoder is None or config.model.vision is None:
        return []
    from PIL import Image

    from headrace.multimodal.families import media_rules
    from headrace.multimodal.items import Picture

    try:
        rules = media_rules(config.model.vision.model_type, files.directory, files.config)
    except ConfigError:
        return []  # Prompts cannot have pictures.
    most = min(config.scheduler.max_num_encoder_tokens, config.scheduler.max_model_len)
    batches: list[list[ItemInputs]] = []
    for side, rows in ((_USUAL_SIDE, CALL_ROWS), (_LARGE_SIDE, 1)):
        while side > _LEAST_SIDE and rules.image_rows(side, side) > most:
            side //= 2
        made = rules.process(Picture(Image.new("RGB", (side, side))), {}, "the picture of the profile")
        items = [ItemInputs(one.modality, ((0, one.expansion.num_rows),), one.tensors, patches=one.patches) for one in made]
        batches.append(items * -(-rows // sum(item.num_rows for item in items)))
    return [functools.partial(encoder.encode, batch) for batch in batches]


def with_vision(files: ModelFiles, config: EngineConfig, encoder: VisionEncoder | None, reason: str) -> EngineConfig:
    """The configuration of an engine with what ``load_vision`` returned."""
    if config.model.vision is None:
        if getattr(files.config, "vision_config", None) is None:
            return config
        from headrace.multimodal.families import why_text_alone

        decision = Decision("vision encoder", "none", why_text_alone(files.config))
        return dataclasses.replace(config, decisions=(*config.decisions, decision))
    decision = Decision("vision encoder", "none" if encoder is None else "transformers", reason)
    scheduler = config.scheduler
    if encoder is None:
        scheduler = dataclasses.replace(scheduler, max_num_encoder_tokens=0)
    return dataclasses.replace(config, scheduler=scheduler, decisions=(*config.decisions, decision))
