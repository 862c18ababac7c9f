"""Makes the input processor of an engine, and completes the engine's report with what the processor knows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from headrace.choices import Modality
from headrace.config import Decision, EngineArgs
from headrace.constrain.factory import GrammarFactory
from headrace.core.request import MediaFacts
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError
from headrace.frontend.inputs import InputProcessor
from headrace.multimodal.media_tokens import configured_media_tokens
from headrace.startup.text import ModelText
from headrace.text.answers import AnswerFormats

if TYPE_CHECKING:
    from headrace.multimodal.media import MediaLoader
    from headrace.multimodal.processor import MultiModalProcessor

logger = logging.getLogger("headrace.engine")


def described(info: EngineInfo, inputs: InputProcessor) -> EngineInfo:
    """The report with what the input processor decides."""
    return with_image_processor(with_formats(info, inputs.answers), inputs.multimodal)


def input_processor(
    text: ModelText, args: EngineArgs, *, vocab_size: int, max_model_len: int, media: MediaFacts | None = None
) -> InputProcessor:
    """Makes the input processor of an engine with resolved vocabulary and context length. ``media``: None: it reads text
    alone."""
    multimodal: MultiModalProcessor | None = None
    loader: MediaLoader | None = None
    text_alone = "the model has no vision part"
    if media is not None:
        try:
            multimodal, loader = _multimodal(text, args, media)
        except ConfigError as error:
            logger.warning("media are refused: %s", error.message)
            text_alone = error.message
    elif any(getattr(text.files.config, part, None) is not None for part in ("vision_config", "audio_config")):
        from headrace.multimodal.families import why_text_alone

        text_alone = why_text_alone(text.files.config)
    return InputProcessor(
        args,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        tokenizer=text.tokenizer,
        generation_config=text.files.generation_config,
        grammars=GrammarFactory(args.structured_outputs_config, text.vocabulary(args, vocab_size)),
        answers=text.answers(args),
        multimodal=multimodal,
        media=loader,
        text_alone=text_alone,
        media_tokens=configured_media_tokens(text.files.config),
        no_text=text.pooling.generation,
    )


def _multimodal(text: ModelText, args: EngineArgs, media: MediaFacts) -> tuple[MultiModalProcessor, MediaLoader]:
    """Raises: ConfigError: there is no tokenizer, or the model's files have no processor that can be used."""
    from headrace.multimodal.families import media_rules
    from headrace.multimodal.media import MediaLoader
    from headrace.multimodal.processor import MultiModalProcessor

    if text.tokenizer is None:
        raise ConfigError("the placeholders of media need a tokenizer", "skip_tokenizer_init")
    counts = args.limit_mm_per_prompt
    rules = media_rules(media.model_type, text.files.directory, text.files.config)
    limits: dict[Modality, int] = {"image": counts.image, "video": counts.video, "audio": counts.audio}
    processor = MultiModalProcessor(rules, text.tokenizer, media, limits, args.mm_processor_cache_bytes)
    return processor, MediaLoader(args)


def with_formats(info: EngineInfo, answers: AnswerFormats | None) -> EngineInfo:
    """The report with the formats of the model's answers among its decisions."""
    if answers is None:
        return info
    lines = [Decision(*decision) for decision in answers.decisions()]
    others = [line for line in info.decisions if line.name not in {line.name for line in lines}]
    return msgspec.structs.replace(info, decisions=[*others, *lines])


def with_image_processor(info: EngineInfo, multimodal: MultiModalProcessor | None) -> EngineInfo:
    """The report with the library that resizes pictures among its decisions."""
    if info.media is None:
        return info
    line = Decision("image processor", "none", "the model's files have none that can be used: prompts have text alone")
    if multimodal is not None:
        if multimodal.backend == "none":  # The model takes features alone.
            return info
        found = "torchvision can be imported" if multimodal.backend == "torchvision" else "torchvision cannot be imported"
        line = Decision("image processor", multimodal.backend, f"{found}; the two round differently")
    return msgspec.structs.replace(info, decisions=[*info.decisions, line])
