"""Frontend: what turns prompts into requests and needs no weights. The client of an engine process has its own."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

import msgspec

from headrace.config import Decision, EngineArgs
from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.constraints import Constraints
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.media import MediaFacts, Modality
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError
from headrace.frontend.inputs import InputProcessor
from headrace.host.jobs import ProcessLimits
from headrace.multimodal.media_tokens import configured_media_tokens
from headrace.sources.files import ModelFiles, find_model
from headrace.text.answers import AnswerFormats
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from headrace.multimodal.media import MediaLoader
    from headrace.multimodal.processor import MultiModalProcessor

logger = logging.getLogger("headrace.engine")


@dataclasses.dataclass(frozen=True)
class Frontend:
    files: ModelFiles
    tokenizer: Tokenizer | None
    """None with ``skip_tokenizer_init``."""

    @functools.cached_property
    def _vocabularies(self) -> dict[int, GrammarVocabulary]:
        return {}

    def _grammars(self, args: EngineArgs, vocab_size: int) -> GrammarVocabulary | None:
        """The vocabulary for constraints, one for all who need it. None without a tokenizer."""
        answers = self.answers(args)
        if self.tokenizer is None or answers is None:
            return None
        made = GrammarVocabulary(self.tokenizer, vocab_size, answers.machine.markers)
        return self._vocabularies.setdefault(vocab_size, made)

    def constraints(self, args: EngineArgs, vocab_size: int, *, lockstep: bool = False) -> Constraints:
        """For an engine that has resolved its vocabulary. ``lockstep``: as in Constraints."""
        vocabulary = self._grammars(args, vocab_size)
        compiler = None if vocabulary is None else GrammarCompiler(vocabulary, args.structured_outputs_config)
        return Constraints(compiler, vocab_size, lockstep=lockstep)

    def inputs(
        self, args: EngineArgs, *, vocab_size: int, max_model_len: int, media: MediaFacts | None = None
    ) -> InputProcessor:
        """For an engine that has resolved its vocabulary and context length. ``media``: None: it reads text alone."""
        multimodal: MultiModalProcessor | None = None
        text_alone = "the model has no vision part"
        if media is not None:
            try:
                multimodal = self._multimodal(args, media)
            except ConfigError as error:
                logger.warning("pictures and videos are refused: %s", error.message)
                text_alone = error.message
        elif getattr(self.files.config, "vision_config", None) is not None:
            from headrace.multimodal.families import why_text_alone

            text_alone = why_text_alone(self.files.config)
        return InputProcessor(
            args,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            tokenizer=self.tokenizer,
            generation_config=self.files.generation_config,
            grammars=GrammarFactory(args.structured_outputs_config, self._grammars(args, vocab_size)),
            answers=self.answers(args),
            multimodal=multimodal,
            media=None if multimodal is None else self._media_loader(args),
            text_alone=text_alone,
            media_tokens=configured_media_tokens(self.files.config),
        )

    def _media_loader(self, args: EngineArgs) -> MediaLoader:
        from headrace.multimodal.media import MediaLoader

        return MediaLoader(args)

    def _multimodal(self, args: EngineArgs, media: MediaFacts) -> MultiModalProcessor:
        """Raises: ConfigError: there is no tokenizer, or the model's files have no processor that can be used."""
        from headrace.multimodal.families import media_rules
        from headrace.multimodal.processor import MultiModalProcessor

        if self.tokenizer is None:
            raise ConfigError("the placeholders of pictures need a tokenizer", "skip_tokenizer_init")
        counts = args.limit_mm_per_prompt
        rules = media_rules(media.model_type, self.files.directory, self.files.config)
        limits: dict[Modality, int] = {"image": counts.image, "video": counts.video}
        return MultiModalProcessor(rules, self.tokenizer, media, limits, args.mm_processor_cache_bytes)

    def answers(self, args: EngineArgs) -> AnswerFormats | None:
        """Raises: ConfigError: the model has no format of the name that was given."""
        if self.tokenizer is None:
            return None
        return AnswerFormats(self.tokenizer, args.tool_call_parser, args.reasoning_parser)


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
        found = "torchvision can be imported" if multimodal.backend == "torchvision" else "torchvision cannot be imported"
        line = Decision("image processor", multimodal.backend, f"{found}; the two round differently")
    return msgspec.structs.replace(info, decisions=[*info.decisions, line])


def load_frontend(args: EngineArgs, chat_template: str | None = None, *, prepared: bool = False) -> Frontend:
    """Finds the model's files and loads its tokenizer; ``prepared``: with the tables that are else made for the first
    request that needs them.

    Raises:
        ConfigError: there is no such model or tokenizer, or they cannot be read.
    """
    files = find_model(args)
    renderer = TemplateRenderer(ProcessLimits(args.max_template_seconds, args.max_template_memory))
    tokenizer = None if args.skip_tokenizer_init else load_tokenizer(files, args.tokenizer, chat_template, renderer)
    if prepared and tokenizer is not None:
        tokenizer.prepare()
    if prepared and files.gguf_file is not None:
        from headrace.sources.gguf import forget

        forget()
    return Frontend(files, tokenizer)
