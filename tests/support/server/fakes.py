"""An engine client that is as the real one to the server, with a byte tokenizer and scripted tokens."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from headrace.config import EngineArgs
from headrace.constrain.factory import GrammarFactory
from headrace.core.request import Request
from headrace.core.weights import WeightStatus
from headrace.engine.info import LayerLine
from headrace.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.frontend.adapters import AdapterNames
from headrace.frontend.inputs import InputProcessor
from headrace.frontend.pooling import PoolingInputs
from headrace.metrics.stats import EngineStats
from headrace.option_groups import StructuredOutputsConfig
from headrace.outputs import ExpertLayers, OutputDelta, RequestTimes, RoutedExperts, TokenLogprobs
from headrace.sampling_params import SamplingParams
from headrace.sources.pooling import PoolingConfig
from support.byte_tokenizer import EOS, VOCAB, ByteTokenizer
from support.engine.info import engine_info

SERVE_FAKE = Path(__file__).with_name("serve_fake.py")
"""A server over a :class:`FakeLLM`, as a program."""
Script = Callable[[Request, int], Sequence[int]]
GRAMMARS = GrammarFactory(StructuredOutputsConfig(), None)
"""Checks the constraints of all fakes: each factory starts a process."""


class Health(NamedTuple):
    ok: bool
    reason: str
    lacks_weights: bool = False


class SeededInputs(InputProcessor):
    """The engine's own gate, for which requests without a seed have the seed 0."""

    def request(self, *args: Any, **options: Any) -> Request:
        request = super().request(*args, **options)
        return msgspec.structs.replace(request, seed=request.sampling.seed or 0)


LIMITS = EngineArgs(
    media_workers=1, max_logprobs=20, max_bad_words_num=1000, bad_words_max_len=64, max_stop_seqs_num=1000, stop_seqs_max_len=64
)


def answer(request: Request, index: int) -> list[int]:
    """The default script: the seed and the sample's index, and characters of one to four bytes."""
    return [*f"Hello {index}, wörld € 🙂 seed {request.seed}".encode(), EOS]


class FakeLLM:
    """Emits one token a step and sample. ``script`` says which; an exception in place of a token breaks the request."""

    def __init__(self, *, script: Script = answer, step: float = 0.0, max_queue: int = 64, load_seconds: float = 0.0) -> None:
        self.script = script
        self.step_seconds = step
        self.max_queue = max_queue
        self.load_seconds = load_seconds
        self._tokenizer: Any = ByteTokenizer()
        self.inputs = self._make_inputs()
        self.pooling = PoolingInputs(self.inputs, PoolingConfig())
        self.pool: Callable[[Request], Sequence[float]] = lambda request: [float(len(request.prompt_token_ids)), 1.0, 2.0, 3.0]
        """Numbers of a prompt that is pooled; an exception in place of them is the prompt's error."""
        self.adapters = SimpleNamespace(names=AdapterNames(LIMITS))
        self.caching = True
        self.running: dict[str, Request] = {}
        self.seen: list[Request] = []
        """Every request that was added."""
        self.aborted: list[str] = []
        self.start_error: Exception | None = None
        self.closed = self.failed = False
        self._health = Health(False, "the engine is loading")
        self._steps = self._preempted = self._prompt = self._generated = self._hits = 0
        self._finished: dict[str, int] = {}
        layer = LayerLine(0, 4, 2, 8, 8, None, 64, "fake", "")
        self.info = engine_info(
            model="fake-model",
            vocab_size=VOCAB,
            max_model_len=512,
            max_num_batched_tokens=512,
            block_size=16,
            num_blocks=[64],
            layers=[layer],
        )

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.inputs = self._make_inputs()

    def _make_inputs(self) -> SeededInputs:
        config = {"eos_token_id": [EOS]}
        return SeededInputs(
            self.limits,
            vocab_size=VOCAB,
            max_model_len=512,
            tokenizer=self.tokenizer,
            generation_config=config,
            grammars=GRAMMARS,
        )

    async def start(self) -> None:
        await asyncio.sleep(self.load_seconds)
        if self.start_error is not None:
            raise self.start_error
        self._health = Health(True, "")

    replicas = None
    text = SimpleNamespace(files=SimpleNamespace(gguf_file=None))
    weights = SimpleNamespace(status=WeightStatus)
    args = EngineArgs()
    limits = LIMITS
    """Arguments of the gate."""

    def serving(self) -> None:
        self.served_at = time.monotonic()

    async def close(self) -> None:
        self.closed = True
        self._health = Health(False, "the engine is closed")

    def die(self) -> None:
        self._health = Health(False, "the engine is restarting")
        self.running.clear()

    def give_up(self) -> None:
        self._health, self.failed = Health(False, "the engine died 3 times"), True

    def health(self) -> Health:
        return self._health

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            step=self._steps,
            num_running=len(self.running),
            num_waiting=0,
            num_preemptions=3,
            kv_blocks_used=len(self.running) * 2,
            kv_blocks_total=64,
            prefix_query_tokens=self._prompt,
            prefix_hit_tokens=self._hits,
            prompt_tokens=self._prompt,
            computed_prompt_tokens=self._prompt - self._hits,
            generation_tokens=self._generated,
            finished=dict(self._finished),
            forward_seconds=0.5,
            replayed_steps=self._steps,
            padding_tokens=3 * self._steps,
        )

    async def reset_prefix_cache(self) -> bool:
        return self.caching

    async def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    async def add(self, *requests: Request) -> FakeStream:
        if not self._health.ok:
            raise EngineDeadError(self._health.reason)
        for place, request in enumerate(requests):
            if len(self.running) >= self.max_queue:
                for taken in requests[:place]:
                    await self.abort(taken.request_id)
                raise QueueFullError(f"{self.max_queue} requests are waiting already")
            if request.request_id in self.running:
                raise RequestError("this request id is in use", "request_id")
            self.running[request.request_id] = request
            self.seen.append(request)
        return FakeStream(self, {request.request_id: self._stream(request) for request in requests})

    async def _stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        if request.pooling is not None:
            yield await self._pooled(request)
            return
        samples = [_Sample(self, request, index) for index in range(request.sampling.n)]
        prompt_len = len(request.prompt_token_ids)
        cached = (prompt_len - 1) // 16 * 16 if request.sampling.prompt_logprobs is None else 0
        self._prompt += prompt_len
        self._hits += cached
        first = True
        while not all(sample.finished for sample in samples):
            await asyncio.sleep(self.step_seconds)
            self._steps += 1
            for sample in samples:
                if sample.finished:
                    continue
                if request.request_id not in self.running:
                    sample.finished = True
                    died = {"finish_reason": "error", "error": "died", "engine_died": True}
                    ended = {"finish_reason": "abort"} if self._health.ok else died
                    yield OutputDelta(request_id=request.request_id, index=sample.index, **ended)
                    continue
                extra: dict[str, Any] = {"num_cached_tokens": cached}
                if first and request.sampling.prompt_logprobs is not None:
                    extra["prompt_logprobs"] = self._prompt_logprobs(request)
                first = False
                yield sample.step(extra)
        self.running.pop(request.request_id, None)

    async def _pooled(self, request: Request) -> OutputDelta:
        await asyncio.sleep(self.step_seconds)
        self._steps += 1
        if self.running.pop(request.request_id, None) is None:
            return OutputDelta(request_id=request.request_id, finish_reason="error", error="died", engine_died=True)
        now = time.monotonic()
        times = RequestTimes(request.arrival_time, now, None, now)
        try:
            numbers = array("f", self.pool(request)).tobytes()
        except EngineError as error:
            return OutputDelta(request_id=request.request_id, finish_reason="error", error=str(error), times=times)
        return OutputDelta(
            request_id=request.request_id, pooled=numbers, num_cached_tokens=0, finish_reason="stop", times=times
        )

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None]:
        tokens, top = request.prompt_token_ids, request.sampling.prompt_logprobs or 0
        return [None, *(token_logprobs(token, top) for token in tokens[1:])]

    def count(self, tokens: int, reason: str | None) -> None:
        self._generated += tokens
        if reason is not None:
            self._finished[reason] = self._finished.get(reason, 0) + 1


class FakeStream:
    """Deltas of some requests as they come; closing it early aborts the requests."""

    def __init__(self, llm: FakeLLM, deltas: dict[str, AsyncGenerator[OutputDelta]]) -> None:
        self._llm = llm
        self._deltas = deltas
        self._next: dict[str, asyncio.Task[OutputDelta | None]] = {}
        self._arrived: OutputDelta | None = None

    async def more(self) -> bool:
        while self._arrived is None:
            for request_id, deltas in self._deltas.items():
                if request_id not in self._next:
                    self._next[request_id] = asyncio.create_task(anext(deltas, None))
            if not self._next:
                return False
            await asyncio.wait(self._next.values(), return_when=asyncio.FIRST_COMPLETED)
            request_id = next(name for name, task in self._next.items() if task.done())
            self._arrived = self._next.pop(request_id).result()
            if self._arrived is None:
                del self._deltas[request_id]
        return True

    async def each(self, take: Callable[[], bool]) -> None:
        while await self.more() and take():
            pass

    def ready(self) -> OutputDelta | None:
        arrived, self._arrived = self._arrived, None
        return arrived

    async def aclose(self) -> None:
        for task in self._next.values():
            task.cancel()
        await asyncio.gather(*self._next.values(), return_exceptions=True)
        for request_id, deltas in self._deltas.items():
            await self._llm.abort(request_id)
            await deltas.aclose()


def token_logprobs(token: int, top: int) -> TokenLogprobs:
    """The chosen token has rank 2; token 0 is impossible; the best are a, b, c, ..."""
    best = [97 + i for i in range(top)]
    ranks = [1, *range(3, top + 2)] if top > 1 else [1] * top
    return TokenLogprobs([token, *best], [-math.inf if token == 0 else -1.5, *(-0.75 * rank for rank in ranks)], 2)


class _Sample:
    """One sample's state: tokens so far, a decoder, a held-back text that may begin a stop string."""

    def __init__(self, llm: FakeLLM, request: Request, index: int) -> None:
        self.index = index
        self.finished = False
        self._llm = llm
        self._request = request
        self._tokens = itertools.chain(llm.script(request, index), itertools.repeat(ord(".")))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._count = 0
        self._times = RequestTimes(request.arrival_time, time.monotonic())

    def _routed_experts(self) -> RoutedExperts:
        """Of a model with two layers, one of them with experts."""
        count = len(self._request.prompt_token_ids) + self._count - 1
        return RoutedExperts(bytes(range(2)) * count, ExpertLayers([1], 2, 2, False))

    @staticmethod
    def _logprobs(token: int, params: SamplingParams) -> TokenLogprobs:
        """The first token was sampled from two tokens, and every other one from all."""
        entry = token_logprobs(token, params.logprobs or 0)
        if not params.return_sampling_mask:
            return entry
        mask = array("i", [token, token + 1]).tobytes() if token == ord("H") else b""
        return msgspec.structs.replace(entry, sampled_from=mask)

    def step(self, extra: dict[str, Any]) -> OutputDelta:
        params, request_id = self._request.sampling, self._request.request_id
        token = next(self._tokens)
        if isinstance(token, Exception):
            if isinstance(token, EngineError) and not isinstance(token, EngineDeadError):
                raise token
            self.finished = True
            client = isinstance(token, RequestError)
            return OutputDelta(
                request_id=request_id,
                index=self.index,
                finish_reason="error",
                error=str(token),
                client_error=client,
                error_code=getattr(token, "code", None),
                error_param=getattr(token, "param", None),
                engine_died=isinstance(token, EngineDeadError),
            )
        self._count += 1
        if self._count == 1:
            self._times = RequestTimes(self._times.arrived, self._times.scheduled, time.monotonic())
        reason: Any = None
        stop: int | str | None = None
        text = ""
        if token in self._request.eos_token_ids and not params.ignore_eos and self._count > params.min_tokens:
            reason = "stop"
        elif token in (params.stop_token_ids or ()):
            reason, stop = "stop", token
        elif token < 256:
            text = self._decoder.decode(bytes([token]))
        elif not params.skip_special_tokens:
            text = "<eos>" if token == EOS else "<bos>"
        text, matched = self._hold(text)
        if matched is not None:
            reason, stop = "stop", matched
        elif reason is None and self._count >= self._request.max_tokens:
            reason = "length"
        if reason is not None:
            self.finished = True
            if matched is None:
                text += self._held + self._decoder.decode(b"", True)
            times = self._times
            extra = extra | {"times": RequestTimes(times.arrived, times.scheduled, times.first_token, time.monotonic())}
        self._llm.count(1, reason)
        return OutputDelta(
            request_id=request_id,
            index=self.index,
            text=text,
            token_ids=[token],
            logprobs=None if params.logprobs is None else [self._logprobs(token, params)],
            finish_reason=reason,
            stop_reason=stop,
            routed_experts=self._routed_experts() if reason is not None and params.return_routed_experts else None,
            **extra,
        )

    def _hold(self, text: str) -> tuple[str, str | None]:
        self._held += text
        params = self._request.sampling
        for stop in params.stop or ():
            at = self._held.find(stop)
            if at >= 0:
                emitted = self._held[: at + (len(stop) if params.include_stop_str_in_output else 0)]
                self._held = ""
                return emitted, stop
        keep = max((n for s in params.stop or () for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        emitted, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return emitted, None
