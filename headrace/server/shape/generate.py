"""Answers in tokens: of SGLang's /generate and of vLLM's /inference/v1/generate."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.core.request import Request
from headrace.outputs import OutputDelta, RoutedExperts
from headrace.server.generation import Generation, Piece
from headrace.server.logprobs import IDS, JSONArray, TokenTexts, chat_logprobs, prompt_logprobs, triples
from headrace.server.schema import GenerateBody, InferenceBody
from headrace.server.sse import DataAnswer
from headrace.server.state import ServedModel, Serving


def _arrays(routed: RoutedExperts) -> dict[str, npt.NDArray[Any]]:
    """``[tokens, layers of the model, top_k]`` each: ids, and float32 weights where they are recorded."""
    kinds: dict[str, tuple[bytes, Any]] = {"routed_experts": (routed.data, "<u2" if routed.shape.wide else np.uint8)}
    if routed.shape.weighted:
        kinds["routed_weights"] = routed.weights, "<f4"
    return {name: _whole(np.frombuffer(data, dtype), routed) for name, (data, dtype) in kinds.items()}


def _whole(numbers: npt.NDArray[Any], routed: RoutedExperts) -> npt.NDArray[Any]:
    shape = routed.shape
    chosen = numbers.reshape(-1, len(shape.layers), shape.top_k)
    if len(shape.layers) == shape.num_layers:
        return chosen
    array = np.zeros((len(chosen), shape.num_layers, shape.top_k), dtype=chosen.dtype)
    array[:, shape.layers] = chosen
    return array


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def routed_int32(routed: RoutedExperts, start: int, num_tokens: int) -> dict[str, Any]:
    """SGLang's fields of ``meta_info``: int32 from token ``start`` on, of the first ``num_tokens`` tokens but the last."""
    parts = {name: array[start : num_tokens - 1] for name, array in _arrays(routed).items()}
    encoded = {
        name: _base64(part.tobytes() if name == "routed_weights" else part.astype("<i4").tobytes())
        for name, part in parts.items()
    }
    return {**encoded, "routed_experts_start_len": start}


def routed_npy(routed: RoutedExperts) -> dict[str, Any]:
    """vLLM's form: a NumPy file."""
    encoded: dict[str, Any] = {}
    for name, array in _arrays(routed).items():
        file = io.BytesIO()
        np.save(file, array)
        encoded[name] = _base64(file.getvalue())
    return encoded


def routed_raw(routed: RoutedExperts) -> dict[str, Any]:
    """prime-rl's form."""
    return {
        name: {"data": _base64(array.tobytes()), "shape": list(array.shape), "start": 0, "dtype": array.dtype.name}
        for name, array in _arrays(routed).items()
    }


class GenerateAnswer(DataAnswer):
    """Shapes deltas as SGLang's results. Each event of a stream has its sample's result so far."""

    def __init__(
        self,
        body: GenerateBody,
        state: Serving,
        generation: Generation,
        names: Sequence[str],
        empty: Sequence[bool],
        *,
        several: bool,
    ) -> None:
        """
        Args:
            names: of the prompts, in the answer.
            empty: whether a prompt's results are without new tokens.
            several: whether the answer is a list.
        """
        self._body = body
        self._generation = generation
        self._several = several
        self._texts = state.model.texts if body.return_text_in_logprobs else None
        self._first = [0]
        """Place of each prompt's first sample."""
        for request in generation.requests:
            self._first.append(self._first[-1] + request.sampling.n)
        shared = _Shared(self._texts, state.weight_version, state.llm.info.vocab_size)
        self._samples = [
            _Sample(shared, prompt, request, names[prompt], empty[prompt])
            for prompt, request in enumerate(generation.requests)
            for _ in range(request.sampling.n)
        ]
        self._prompts: list[dict[str, Any]] = [{"input_token_logprobs": []} for _ in names] if body.return_logprob else []
        """Logprobs of each prompt."""

    async def prepare(self, piece: Piece) -> None:
        if (routed := piece.delta.routed_experts) is not None:
            sample = self._samples[self._first[piece.prompt] + piece.delta.index]
            start_len = self._body.routed_experts_start_len
            num_tokens = sample.num_tokens + (0 if sample.empty else len(piece.delta.token_ids))
            sample.experts = await self._generation.in_thread(lambda: routed_int32(routed, start_len, num_tokens))
        entries, start = piece.delta.prompt_logprobs, self._body.logprob_start_len
        if entries is None:
            return

        def shape() -> dict[str, Any]:
            own, best = triples(self._texts, [entry for entry in entries[start:] if entry is not None])
            if start == 0:  # Nothing precedes the first token.
                first = self._generation.requests[piece.prompt].prompt_token_ids[0]
                own, best = [[None, first, self._texts and self._texts.text(first)], *own], [None, *best]
            shaped = {"input_token_logprobs": own}
            return shaped | ({"input_top_logprobs": best} if self._body.top_logprobs_num else {})

        self._prompts[piece.prompt] = await self._generation.in_thread(shape)

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        place = self._first[piece.prompt] + piece.delta.index
        self._samples[place].add(piece.delta)
        if self._body.stream:
            yield self._result(place)

    def last(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> Any:
        results = [self._result(place) for place in range(len(self._samples))]
        return results if self._several else results[0]

    def _result(self, place: int) -> dict[str, Any]:
        sample = self._samples[place]
        result = sample.result(self._generation.cached_tokens(sample.prompt), self._body.top_logprobs_num > 0)
        if self._prompts:
            result["meta_info"] |= self._prompts[sample.prompt]
        return result | {"index": place} if self._several and self._body.stream else result


class _Shared(NamedTuple):
    """Facts that the samples of one answer have in common."""

    texts: TokenTexts | None
    """Texts of the tokens in logprobs; None: they are not shown."""
    version: str
    """Version of the weights when the request arrived."""
    vocab_size: int


class _Sample:
    """One sample so far."""

    def __init__(self, shared: _Shared, prompt: int, request: Request, name: str, empty: bool) -> None:
        """
        Args:
            prompt: index of its prompt.
            name: of the request, in the answer.
            empty: whether new tokens are left out.
        """
        self.prompt, self.empty = prompt, empty
        self._shared, self._request, self._name = shared, request, name
        self._scores = request.sampling.logprobs is not None
        self._text = ""
        self._ids: list[int] = []
        self._logprobs, self._best = JSONArray(), JSONArray()
        self._masks: list[bytes] = []
        self.experts: dict[str, Any] = {}
        """Fields of ``meta_info`` about experts."""
        self._finish: OutputDelta | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self._request.prompt_token_ids) + len(self._ids)

    def add(self, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self._finish = msgspec.structs.replace(delta, finish_reason="length") if self.empty else delta
        if self.empty:
            return
        self._text += delta.text
        self._ids += delta.token_ids
        if delta.logprobs is not None:
            own, best = triples(self._shared.texts, delta.logprobs)
            self._logprobs.extend(own)
            self._best.extend(best)
            self._masks += [entry.sampled_from for entry in delta.logprobs if entry.sampled_from is not None]

    def result(self, cached_tokens: int, with_best: bool) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        if self._scores:
            scores = {"output_token_logprobs": self._logprobs.json, "output_token_logprobs_length": len(self._ids)}
            scores |= {"output_top_logprobs": self._best.json} if with_best else {}
        if self._request.sampling.return_sampling_mask and self._finish is not None:
            scores |= _spans(self._masks, self._shared.vocab_size)
        times = None if self._finish is None else self._finish.times
        if times is not None and times.finished is not None:
            scores["e2e_latency"] = times.finished - times.arrived
        counts = {
            "prompt_tokens": len(self._request.prompt_token_ids),
            "completion_tokens": len(self._ids),
            "cached_tokens": cached_tokens,
        }
        spans = [] if self._finish is None else self._finish.weight_versions
        version = spans[-1].version if spans else self._shared.version
        head: dict[str, Any] = {"id": self._name, "weight_version": version, "finish_reason": self._finish_reason()}
        head |= {"weight_versions": [span.json for span in spans]} if spans else {}
        text = {"text": self._text} if self._request.sampling.detokenize else {}
        return {**text, "output_ids": self._ids, "meta_info": {**head, **counts, **scores, **self.experts}}

    def _finish_reason(self) -> dict[str, Any] | None:
        if self._finish is None:
            return None
        match self._finish.finish_reason:
            case "length":
                return {"type": "length", "length": len(self._ids)}
            case "stop":
                matched, last = self._finish.stop_reason, self._ids[-1:]
                if matched is None and last and last[0] in self._request.eos_token_ids:
                    matched = last[0]
                return {"type": "stop", "matched": matched}
            case _:
                return {"type": "abort", "message": "the request was aborted"}


def _spans(masks: Sequence[bytes], vocab_size: int) -> dict[str, str]:
    """The ids that each token was sampled from, one behind the other, and where each token's begin, as slime reads them:
    base64 of int32."""
    everything = np.arange(vocab_size, dtype="<i4").tobytes() if b"" in masks else b""
    parts = [mask or everything for mask in masks]
    offsets = np.cumsum([0, *(len(part) // 4 for part in parts)]).astype("<i4")
    ids, starts = (base64.b64encode(data).decode() for data in (b"".join(parts), offsets.tobytes()))
    return {"top_p_token_ids": ids, "top_p_token_offsets": starts}


class InferenceAnswer(DataAnswer):
    """Shapes deltas as vLLM's answers in tokens."""

    def __init__(self, body: InferenceBody, model: ServedModel, generation: Generation, request_id: str) -> None:
        self._body = body
        self._generation = generation
        self._model = model
        (request,) = generation.requests
        self._top, self._masks = request.sampling.logprobs, request.sampling.return_sampling_mask
        self._head = {"request_id": body.request_id or request_id}
        self._whole_head = {**self._head, "id": request_id, "created": int(time.time()), "model": model.called(body.model)}
        self._choices: list[dict[str, Any]] = [
            {"index": index, "finish_reason": None, "stop_reason": None, "token_ids": []} for index in range(request.sampling.n)
        ]
        for choice in self._choices if self._masks else ():
            choice["sampling_mask"] = []
        self._logprobs = [JSONArray() for _ in self._choices]
        self._prompt_logprobs: Any = None
        self._experts: dict[int, dict[str, Any]] = {}
        """Index of a finished sample -> fields of its experts."""
        options = body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats

    async def prepare(self, piece: Piece) -> None:
        entries, routed = piece.delta.prompt_logprobs, piece.delta.routed_experts
        if routed is not None:
            encode = routed_npy if self._body.routed_experts_format == "npy" else routed_raw
            self._experts[piece.delta.index] = await self._generation.in_thread(lambda: encode(routed))
        if entries is not None:
            shaped = await self._generation.in_thread(lambda: prompt_logprobs(self._model.texts, entries).json)
            self._prompt_logprobs = shaped

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        delta = piece.delta
        content = None
        if self._top is not None and delta.logprobs is not None:
            content = chat_logprobs(IDS, delta.logprobs, self._top)["content"]
        finish: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if delta.index in self._experts:
            finish |= self._experts[delta.index]
        if delta.weight_versions:
            finish["weight_versions"] = [span.json for span in delta.weight_versions]
        masks = {"sampling_mask": [entry.sampling_mask for entry in delta.logprobs or ()]} if self._masks else {}
        if self._body.stream:
            if delta.token_ids or delta.finish_reason:
                scores = None if content is None else {"content": content}
                choice = {"index": delta.index, **finish, "token_ids": delta.token_ids, "logprobs": scores, **masks}
                usage = {"usage": self._generation.usage} if self._continuous_usage else {}
                yield {**self._head, "choices": [choice], **usage}
            return
        for name, values in {"token_ids": delta.token_ids, **masks}.items():
            self._choices[delta.index][name] += values
        self._choices[delta.index] |= finish
        if content is not None:
            self._logprobs[delta.index].extend(content)

    def last(self) -> list[dict[str, Any]]:
        return [{**self._head, "choices": [], "usage": self._generation.usage}] if self._include_usage else []

    def whole(self) -> dict[str, Any]:
        scores = [None if self._top is None else {"content": each.json} for each in self._logprobs]
        choices = [{**choice, "logprobs": each} for choice, each in zip(self._choices, scores, strict=True)]
        ending = {"usage": self._generation.usage, "prompt_logprobs": self._prompt_logprobs, "kv_transfer_params": None}
        return {**self._whole_head, "choices": choices, **ending}
