"""ModelText: what is known of a model without its weights. The client of an engine process has one too."""

from __future__ import annotations

import dataclasses
import functools

from headrace.config import EngineArgs
from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.constraints import Constraints
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.host.jobs import ProcessLimits
from headrace.sources.files import ModelFiles, find_model
from headrace.sources.pooling import PoolingConfig, find_pooling
from headrace.text.answers import AnswerFormats
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class ModelText:
    """A model's files and tokenizer, its formats of answers, and the vocabulary of constraints."""

    files: ModelFiles
    tokenizer: Tokenizer | None
    """None with ``skip_tokenizer_init``."""
    pooling: PoolingConfig = dataclasses.field(default_factory=PoolingConfig)
    """The kinds of requests that the model serves."""

    @functools.cached_property
    def _vocabularies(self) -> dict[int, GrammarVocabulary]:
        return {}

    def vocabulary(self, args: EngineArgs, vocab_size: int) -> GrammarVocabulary | None:
        """The vocabulary for constraints, one for all who need it. None without a tokenizer."""
        answers = self.answers(args)
        if self.tokenizer is None or answers is None:
            return None
        made = GrammarVocabulary(self.tokenizer, vocab_size, answers.machine.markers)
        return self._vocabularies.setdefault(vocab_size, made)

    def constraints(self, args: EngineArgs, vocab_size: int, *, lockstep: bool = False) -> Constraints:
        """Makes the constraints of an engine that has resolved its vocabulary. ``lockstep``: see Constraints."""
        vocabulary = self.vocabulary(args, vocab_size)
        compiler = None if vocabulary is None else GrammarCompiler(vocabulary, args.structured_outputs_config)
        return Constraints(compiler, vocab_size, lockstep=lockstep)

    def answers(self, args: EngineArgs) -> AnswerFormats | None:
        """Raises: ConfigError: the model has no format of the name that was given."""
        if self.tokenizer is None:
            return None
        return AnswerFormats(self.tokenizer, args.tool_call_parser, args.reasoning_parser)


def load_text(args: EngineArgs, chat_template: str | None = None, *, prepared: bool = False) -> ModelText:
    """Finds the model's files and loads its tokenizer; ``prepared``: with the tables that are else made for the first
    request that needs them.

    Raises:
        ConfigError: there is no such model or tokenizer, or they cannot be read.
    """
    files = find_model(args)
    pooling = find_pooling(args, files)
    files = dataclasses.replace(files, decisions=(*files.decisions, *pooling.decisions))
    renderer = TemplateRenderer(ProcessLimits(args.max_template_seconds, args.max_template_memory))
    tokenizer = None if args.skip_tokenizer_init else load_tokenizer(files, args.tokenizer, chat_template, renderer)
    if prepared and tokenizer is not None:
        tokenizer.prepare()
    if prepared and files.gguf_file is not None:
        from headrace.sources.gguf import forget

        forget()
    return ModelText(files, tokenizer, pooling)
