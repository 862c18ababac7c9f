"""The embedded model on the GPU says what it says on the CPU in float32, up to genuine near-ties.

Where two ways of computing part, the tokens they chose must have been as good as equally likely: the gap is reported.
Then both are asked for the logprobs of the same text, where nothing can part.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.bench.texts import CHAT_PROMPTS, PROSE
from headrace.config import EngineArgs
from headrace.frontend.llm import LLM
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

from .conftest import CUDA

AMOUNT = {"cpu": (3, 10), "cuda": (12, 64)}
"""Prompts, and tokens of each output."""
NEAREST = 20


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds in nats."""

    gap: float
    """Between two tokens that count as equally likely, by the CPU's float32."""
    largest: float
    """Difference between logprobs of the same token of the same text."""
    mean: float


BOUNDS = {"float32": Bounds(1e-3, 5e-3, 2e-4), "bfloat16": Bounds(0.2, 0.6, 0.06)}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"enforce_eager": True, "pipeline_depth": 1},
    "chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
}


def engine(device: str, dtype: str, **changes: Any) -> LLM:
    plain = {"max_model_len": 1024, "num_kv_blocks": 2000, "quantization": "none", "enable_prefix_caching": False}
    return LLM(device=device, dtype=dtype, **plain | changes)


@dataclasses.dataclass(frozen=True)
class Reference:
    prompts: list[list[int]]
    outputs: list[RequestOutput]
    texts: list[list[int]]
    """Tokens of each prompt and its greedy output; and of a longer prompt of prose."""
    logprobs: list[list[float]]


@functools.cache
def reference(count: int, length: int) -> Reference:
    """Float32 on the CPU: greedy outputs of ``length`` tokens for ``count`` prompts."""
    with engine("cpu", "float32") as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHAT_PROMPTS[: count - 2]]
        prose = tokenizer.encode(PROSE, add_special_tokens=False)
        prompts += [prose[:300], prose[100:117]]
        params = SamplingParams(temperature=0.0, max_tokens=length, logprobs=NEAREST)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        return Reference(prompts, outputs, texts, text_logprobs(llm, texts))


def text_logprobs(llm: LLM, texts: list[list[int]]) -> list[list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params)
    return [
        [position[token].logprob for position, token in zip(output.prompt_logprobs or [], text, strict=True) if position]
        for output, text in zip(outputs, texts, strict=True)
    ]


def parting(wanted: RequestOutput, found: list[int]) -> dict[str, Any] | None:
    """Describes where the outputs part, and how far apart the two tokens were; None: they do not part."""
    tokens = wanted.outputs[0].token_ids
    place = next((place for place, (a, b) in enumerate(zip(tokens, found, strict=False)) if a != b), None)
    if place is None:
        assert len(tokens) == len(found)
        return None
    position = (wanted.outputs[0].logprobs or [])[place]
    other = position.get(found[place])
    gap = position[tokens[place]].logprob - other.logprob if other is not None else float("inf")
    return {"prompt": wanted.request_id, "place": place, "tokens": [tokens[place], found[place]], "gap": gap}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "bfloat16", marks=pytest.mark.slow),
        pytest.param("cuda", "float32", marks=CUDA.marks),
        pytest.param("cuda", "bfloat16", marks=CUDA.marks),
    ],
)
def test_says_what_the_cpu_says(device: str, dtype: str, way: str, report: Callable[[str, dict[str, Any]], None]) -> None:
    if device == "cpu" and way != "chunks":
        pytest.skip("one way is enough where the kernels are the same")
    count, length = AMOUNT[device]
    known, bounds = reference(count, length), BOUNDS[dtype]
    with engine(device, dtype, **WAYS[way]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=length)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in known.prompts], params)
        logprobs = text_logprobs(llm, known.texts)
        facts = {"device": llm.info.environment["device"], "decisions": {line.name: line.value for line in llm.info.decisions}}
    found = [output.outputs[0].token_ids for output in outputs]
    partings = [where for wanted, tokens in zip(known.outputs, found, strict=True) if (where := parting(wanted, tokens))]
    apart = [abs(a - b) for one, other in zip(logprobs, known.logprobs, strict=True) for a, b in zip(one, other, strict=True)]
    measured = {
        "largest_gap": max((where["gap"] for where in partings), default=0.0),
        "largest_difference": max(apart),
        "mean_difference": statistics.fmean(apart),
        "tokens_equal": sum(where["place"] for where in partings)
        + sum(len(tokens) for wanted, tokens in zip(known.outputs, found, strict=True) if not parting(wanted, tokens)),
        "tokens": sum(map(len, found)),
        "logprobs": len(apart),
    }
    report(f"embedded-{device}-{dtype}-{way}", facts | measured | {"partings": partings, "bounds": dataclasses.asdict(bounds)})
    assert measured["largest_gap"] <= bounds.gap, partings
    assert measured["largest_difference"] <= bounds.largest and measured["mean_difference"] <= bounds.mean, measured
    assert measured["tokens"] > count * length // 3 and measured["logprobs"] > 300


QUANTISED = Bounds(gap=1.5, largest=2.0, mean=0.15)
"""Bounds with KV in FP8."""


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "float32", marks=pytest.mark.slow),
        pytest.param("cuda", "float32", marks=CUDA.marks),
        pytest.param("cuda", "bfloat16", marks=CUDA.marks),
    ],
)
def test_fp8_kv_says_nearly_the_same(device: str, dtype: str, report: Callable[[str, dict[str, Any]], None]) -> None:
    """Logprobs of a given text are near those with KV in float32, and their mean is as good; greedy text is text that the model
    finds likely with KV in float32."""
    count, length = AMOUNT[device]
    known = reference(count, length)
    asked = {"cuda": "auto", "cpu": "reference"}[device]
    with engine(device, dtype, kv_cache_dtype="fp8_e4m3", attention_backend=asked) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in known.prompts], SamplingParams(temperature=0.0, max_tokens=length)
        )
        logprobs = text_logprobs(llm, known.texts)
        backends = {line.backend for line in llm.info.layers}
        bytes_per_token = sum(line.kv_bytes_per_token for line in llm.info.layers)
    # Long prompts may be FlashInfer's, of bfloat16 alone.
    assert backends <= {"cuda": {"triton", "flashinfer+triton"}, "cpu": {"reference"}}[device]
    assert bytes_per_token == 30 * 3 * (2 * 64 + 8), "a byte a number, and two scales a head"
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(known.prompts, outputs, strict=True)]
    gaps = behind_the_best(texts, [len(output.outputs[0].token_ids) for output in outputs])
    pairs = [(a, b) for one, other in zip(logprobs, known.logprobs, strict=True) for a, b in zip(one, other, strict=True)]
    measured = {
        "largest_difference": float(np.abs(np.subtract(*zip(*pairs, strict=True))).max()),  # NaN if one is.
        "mean_difference": statistics.fmean(abs(a - b) for a, b in pairs),
        "worse_by": statistics.fmean(b - a for a, b in pairs),
        "largest_gap": max(gaps),
        "mean_gap": statistics.fmean(gaps),
        "logprobs": len(pairs),
    }
    report(f"embedded-fp8-kv-{device}-{dtype}", measured | {"bounds": dataclasses.asdict(QUANTISED)})
    assert measured["largest_difference"] <= QUANTISED.largest and measured["mean_difference"] <= QUANTISED.mean, measured
    assert measured["worse_by"] <= 0.05, measured
    assert measured["largest_gap"] <= QUANTISED.gap and measured["mean_gap"] <= QUANTISED.mean, measured
    assert measured["mean_difference"] > 1e-3 and len(pairs) > 300 and len(gaps) > count * length // 3, measured


def behind_the_best(texts: list[list[int]], counts: list[int]) -> list[float]:
    """Returns by how much each of a text's last tokens is less likely than the likeliest, by the CPU's float32."""
    with engine("cpu", "float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        judged = llm.generate([{"prompt_token_ids": text} for text in texts], params)
    gaps: list[float] = []
    for text, count, output in zip(texts, counts, judged, strict=True):
        positions = list(zip(text, output.prompt_logprobs or [], strict=True))[-count:]
        gaps += [max(entry.logprob for entry in at.values()) - at[token].logprob for token, at in positions if at]
    return gaps


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="there is no CUDA device")
def test_a_gpu_is_chosen_where_there_is_one() -> None:
    with LLM(num_kv_blocks=1000, max_model_len=1024) as llm:
        assert llm.info.device == "cuda" and llm.info.dtype == "bfloat16"
        chosen = {line.name: line.value for line in llm.info.decisions}
        assert chosen["pipeline_depth"] == "2" and chosen["CUDA graphs"] != "none"
    assert EngineArgs().device == "auto"
