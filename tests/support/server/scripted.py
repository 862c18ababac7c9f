"""A fake engine whose answers go through the engine's own output processing: detokeniser, parser, stop strings."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.request import Request
from headrace.core.sequence import Sequence as EngineSequence
from headrace.core.sequence import SequenceUpdate
from headrace.engine.outputs import OutputProcessor
from headrace.option_groups import StructuredOutputsConfig
from headrace.outputs import OutputDelta, TokenLogprobs
from headrace.server.settings import ServerSettings
from headrace.text.answers import AnswerFormats
from headrace.text.tokenizer import Tokenizer
from support.models.tiny_llama import write_tokenizer
from support.server.fakes import LIMITS, FakeLLM, SeededInputs
from support.server.harness import Api

Scripts = Callable[..., Api]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """A byte tokenizer with marker tokens, which are not special, as Qwen3's."""
    write_tokenizer(folder)
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    hf.add_tokens(MARKERS)
    hf.chat_template = template
    return Tokenizer(hf)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def scripts(made: Tokenizer) -> Scripts:
    """Makes the API of a server whose model answers with these texts."""

    def api(*texts: str, settings: ServerSettings | None = None, **formats: str) -> Api:
        return Api(ScriptedLLM(made, texts, **formats), settings)

    return api


def with_template(made: Tokenizer, template: str) -> Tokenizer:
    hf = copy.copy(made.hf)
    hf.chat_template = template
    return Tokenizer(hf, renderer=made.renderer)


@functools.lru_cache(maxsize=2)
def grammars_of(made: Tokenizer, markers: frozenset[int]) -> tuple[GrammarVocabulary, GrammarFactory]:
    """What checks the constraints of one tokenizer after another: each factory starts a process."""
    vocabulary = GrammarVocabulary(made, made.vocab_size, markers)
    return vocabulary, GrammarFactory(StructuredOutputsConfig(), vocabulary)


class ScriptedLLM(FakeLLM):
    """Answers request by request with ``texts`` or token ids, the last again and again; one token a delta.

    A tuple has a text for each sample of its request.
    """

    def __init__(
        self,
        made: Tokenizer,
        texts: Sequence[str | list[int] | tuple[str, ...]],
        *,
        tools: str = "auto",
        reasoning: str = "auto",
        max_model_len: int = 4096,
    ) -> None:
        self._max_model_len = max_model_len
        self._formats = AnswerFormats(made, tools, reasoning)
        self.texts = texts
        self.vocabulary, self.grammars = grammars_of(made, frozenset(self._formats.machine.markers))
        super().__init__()
        self.tokenizer = made

    def _make_inputs(self) -> SeededInputs:
        made: Any = self.tokenizer
        return SeededInputs(
            LIMITS,
            vocab_size=made.vocab_size,
            max_model_len=self._max_model_len,
            tokenizer=made,
            generation_config={"eos_token_id": made.eos_token_ids},
            answers=self._formats if isinstance(made, Tokenizer) else None,
            grammars=self.grammars,
        )

    async def _stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        if request.pooling is not None:
            yield await self._pooled(request)
            return
        text = self.texts[min(len(self.seen), len(self.texts)) - 1]
        outputs = OutputProcessor(self.tokenizer)
        blocks: Any = SimpleNamespace(token_ids=list(request.prompt_token_ids), identity=request.cache_identity)
        for index in range(request.sampling.n):
            own = text[index] if isinstance(text, tuple) else text
            spelled = own if isinstance(own, list) else self.tokenizer.encode(own, add_special_tokens=False)
            tokens = spelled + self.tokenizer.eos_token_ids[:1]
            sequence = EngineSequence(index, request, index, blocks, max_model_len=self._max_model_len)
            sequence.scheduled_at = time.monotonic()
            outputs.open([sequence])
            for count, token in enumerate(tokens, start=1):
                if self.step_seconds:
                    await asyncio.sleep(self.step_seconds)
                sequence.first_token_at = sequence.first_token_at or time.monotonic()
                ended = "stop" if count == len(tokens) else "length" if count == request.max_tokens else None
                logprobs = None if request.sampling.logprobs is None else [TokenLogprobs([token], [-1.0], 1)]
                deltas, stopped = outputs.process([SequenceUpdate(sequence, [token], logprobs, finish_reason=ended)])
                for delta in deltas:
                    yield delta
                if ended or stopped:
                    break
        self.running.pop(request.request_id, None)
