"""An engine client that is as the real one to the server, with a byte tokenizer and scripted tokens."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from headrace.core.request import Request
from headrace.engine.info import EngineInfo, LayerLine
from headrace.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.metrics.stats import EngineStats
from headrace.outputs import Logprob, OutputDelta, PositionLogprobs, RequestTimes
from headrace.sampling_params import SamplingParams
from headrace.text.vocab import TokenBytes

BOS, EOS = 256, 257
VOCAB = 258
Script = Callable[[Request, int], Sequence[int]]


class Health(NamedTuple):
    ok: bool
    reason: str


class ByteTokenizer:
    """Token i < 256 is the byte i; so most non-ASCII characters are several tokens."""

    def __init__(self) -> None:
        pieces = [bytes([i]) for i in range(256)] + [b"<bos>", b"<eos>"]
        self.token_bytes = TokenBytes(pieces, frozenset({BOS, EOS}))
        self.vocab_size = VOCAB
        self.eos_token_ids = [EOS]
        self.rendered: list[dict[str, Any]] = []
        """Arguments of each call of render_chat."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.token_bytes.special))
        return b"".join(self.token_bytes.pieces[i] for i in kept).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        self.rendered.append({"messages": messages, **template_kwargs})
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
        if "chat_template" in template_kwargs:
            raise RequestError("chat_template_kwargs cannot set chat_template", "chat_template_kwargs")
        if messages[-1]["role"] == "tool" and "tool_call_id" not in messages[-1]:
            raise RequestError("the chat template cannot render these messages: tool_call_id is undefined", "messages")
        turns = [f"[{m['role']}{':' + m['name'] if 'name' in m else ''}]{m['content']}" for m in messages]
        text = "".join(template_kwargs.get("prefix", "") + turn + "\n" for turn in turns)
        if continue_final_message:
            return text[:-1]
        return text + ("[assistant]" if add_generation_prompt else "")


class FakeInputs:
    def __init__(self, llm: FakeLLM) -> None:
        self._llm = llm
        self.default_sampling = SamplingParams()

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> Request:
        tokens = prompt["prompt_token_ids"]
        room = self._llm.info.max_model_len - len(tokens)
        if not tokens:
            raise RequestError("the prompt is empty", "prompt")
        if max(tokens) >= VOCAB:
            raise RequestError(f"token id {max(tokens)} is not in the vocabulary", "prompt")
        if room < (params.max_tokens or 1):
            raise RequestError("the prompt and max_tokens do not fit in the context", "prompt" if room < 1 else "max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > 20 or getattr(params, name) == -1:
                raise RequestError(f"{name} may be at most 20", name)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if any(token >= VOCAB for token in getattr(params, name) or ()):
                raise RequestError(f"{name} holds a token that is not in the vocabulary", name)
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling=params,
            max_tokens=params.max_tokens or room,
            seed=params.seed or 0,
            eos_token_ids=[EOS],
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=time.monotonic(),
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
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.inputs = FakeInputs(self)
        self.running: dict[str, Request] = {}
        self.seen: list[Request] = []
        """Every request that was added."""
        self.aborted: list[str] = []
        self.start_error: Exception | None = None
        self.closed = False
        self._health = Health(False, "the engine is loading")
        self._steps = self._preempted = self._prompt = self._generated = self._hits = 0
        self._finished: dict[str, int] = {}
        layer = LayerLine(0, 4, 2, 8, 8, None, 64, "fake", "")
        self.info = EngineInfo(
            model="fake-model",
            architecture="Fake",
            vocab_size=VOCAB,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            block_size=16,
            num_blocks=[64],
            dtype="float32",
            quantization="none",
            device="cpu",
            timeline=[],
            memory=[],
            layers=[layer],
            decisions=[],
        )

    async def start(self) -> None:
        await asyncio.sleep(self.load_seconds)
        if self.start_error is not None:
            raise self.start_error
        self._health = Health(True, "")

    async def close(self) -> None:
        self.closed = True
        self._health = Health(False, "the engine is closed")

    def die(self) -> None:
        self._health = Health(False, "the engine is restarting")
        self.running.clear()

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
        return not self.running

    async def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    async def add(self, request: Request) -> FakeStream:
        if not self._health.ok:
            raise EngineDeadError(self._health.reason)
        if len(self.running) >= self.max_queue:
            raise QueueFullError(f"{self.max_queue} requests are waiting already")
        if request.request_id in self.running:
            raise RequestError("this request id is in use", "request_id")
        self.running[request.request_id] = request
        self.seen.append(request)
        return FakeStream(self, request.request_id, self._stream(request))

    async def _stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
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
                    ended = {"finish_reason": "abort"} if self._health.ok else {"finish_reason": "error", "error": "died"}
                    yield OutputDelta(request_id=request.request_id, index=sample.index, **ended)
                    continue
                extra: dict[str, Any] = {"num_cached_tokens": cached}
                if first and request.sampling.prompt_logprobs is not None:
                    extra["prompt_logprobs"] = self._prompt_logprobs(request)
                first = False
                yield sample.step(extra)
        self.running.pop(request.request_id, None)

    def _prompt_logprobs(self, request: Request) -> list[PositionLogprobs | None]:
        tokens, top = request.prompt_token_ids, request.sampling.prompt_logprobs or 0
        return [None, *(position_logprobs(token, top) for token in tokens[1:])]

    def count(self, tokens: int, reason: str | None) -> None:
        self._generated += tokens
        if reason is not None:
            self._finished[reason] = self._finished.get(reason, 0) + 1


class FakeStream:
    """Deltas of one request; closing it early aborts the request."""

    def __init__(self, llm: FakeLLM, request_id: str, deltas: AsyncGenerator[OutputDelta]) -> None:
        self._llm = llm
        self._request_id = request_id
        self._deltas = deltas

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> OutputDelta:
        return await anext(self._deltas)

    async def aclose(self) -> None:
        await self._llm.abort(self._request_id)
        await self._deltas.aclose()


def position_logprobs(token: int, top: int) -> PositionLogprobs:
    """The chosen token has rank 2; token 0 is impossible; the best are a, b, c, ..."""
    piece = "<special>" if token >= 256 else bytes([token]).decode("utf-8", "replace")
    chosen = {token: Logprob(-math.inf if token == 0 else -1.5, 2, piece)}
    ranks = [1, *range(3, top + 2)] if top > 1 else [1] * top
    others = {97 + i: Logprob(-0.75 * rank, rank, chr(97 + i)) for i, rank in enumerate(ranks) if 97 + i != token}
    return chosen | others


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

    def step(self, extra: dict[str, Any]) -> OutputDelta:
        params, request_id = self._request.sampling, self._request.request_id
        token = next(self._tokens)
        if isinstance(token, Exception):
            if isinstance(token, EngineError):
                raise token
            self.finished = True
            return OutputDelta(request_id=request_id, index=self.index, finish_reason="error", error=str(token))
        self._count += 1
        if self._count == 1:
            self._times = RequestTimes(self._times.arrived, self._times.scheduled, time.monotonic())
        reason: Any = None
        stop: int | str | None = None
        text = ""
        if token == EOS and not params.ignore_eos and self._count > params.min_tokens:
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
            logprobs=None if params.logprobs is None else [position_logprobs(token, params.logprobs)],
            finish_reason=reason,
            stop_reason=stop,
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
