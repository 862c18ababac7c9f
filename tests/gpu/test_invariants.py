"""The invariants of whole engines, with graphs and overlap on: company, order, chunks, preemption, cache hits, reused slots
and aborts never change what a request gets.

What plain steps bring, each request alone, no graph and nothing overlapped, is what every other way of serving must bring:
the same tokens in float32; logprobs within a bound in bfloat16, where fast kernels round differently for different shapes;
every bit under ``deterministic``.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runner.features import FEATURES
from support.runner.harness import prompt, request

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.runner.graphs import StepGraphs

from .conftest import CUDA
from .driver import Driver, Sample, Samples, chosen, driving, of_prompt
from .tiny import EVERY_EXPERT, FAMILIES

MAX_LEN = 96
EXACT = 2e-4
"""Bound of a logprob's difference in float32."""
BOUND, MEAN = 0.6, 0.06
"""Bounds of differences between logprobs in bfloat16, in nats: the largest, and their mean."""

FP8: dict[str, dict[str, Any]] = {
    "cpu": {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "reference"},
    "cuda": {"kv_cache_dtype": "fp8_e4m3"},
}
IN_FP8 = ("llama", "qwen3", "windows", "groups of 3, width 80")
TIPPED = {"cpu": (0.02, 2e-4), "cuda": (BOUND, MEAN)}
"""The same with KV in FP8, of which a rounding in float32 may tip one; on a GPU, attention multiplies it in float16."""
QUANTISED = (1.6, 0.25)
"""The same between KV in FP8 and in float32, of models that make the most of every number."""

FORCED = [
    request(f"forced {token}", prompt(token, length), allowed_token_ids=[token], logprobs=0, max_tokens=24)
    for token, length in ((5, 6), (60, 11), (121, 32), (150, 1), (33, 70))
]
"""Requests that sample the same tokens whatever the model computes, so that their logprobs can be compared to the end."""
GIVEN = [
    request(f"given {length}", prompt(length, length), prompt_logprobs=0, logprobs=0, max_tokens=2)
    for length in (2, 17, 33, 80)
]
REQUESTS = [*FEATURES.values(), *FORCED, *GIVEN]
PLAIN = [
    request(f"plain {length}", prompt(length, length), temperature=float(length % 2), max_tokens=30, ignore_eos=True)
    for length in (1, 2, 6, 9, 15, 16, 17, 28, 31, 32, 33, 48, 60, 63, 65)
]
"""Nothing but a temperature: steps of such rows alone are those that a whole graph may hold. The longest finds a state."""
BY_NAME = {each.request_id: each for each in (*REQUESTS, *PLAIN)}


def with_logprobs(each: Request) -> Request:
    counted = each.sampling.logprobs is not None
    return each if counted else msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, logprobs=0))


def shuffled(requests: list[Request], seed: int) -> list[Request]:
    """Every other one of those that are not plain has logprobs."""
    result = [with_logprobs(each) if place % 2 and each not in PLAIN else each for place, each in enumerate(requests)]
    random.Random(seed).shuffle(result)
    return result


# ------------------------------------------------------------------ ways of serving


def together(driver: Driver, asked: list[Request]) -> Samples:
    driver.add(*shuffled(asked, 0))
    return driver.run()


def arriving(driver: Driver, asked: list[Request]) -> Samples:
    return driver.run(arrivals=shuffled(asked, 1))


def one_by_one(driver: Driver, asked: list[Request]) -> Samples:
    for each in shuffled(asked, 2):
        driver.add(each if each in PLAIN else with_logprobs(each))
        driver.run()
    return driver.samples


def preempting(driver: Driver, asked: list[Request]) -> Samples:
    """Every other step somebody loses slot and blocks, in the middle of a prompt or of an output."""
    chance = random.Random(3)

    def preempt(step: int) -> None:
        # Not for ever: a prompt in many chunks would never get to its end.
        running = list(driver.scheduler._running)
        if running and step % 2 == 0 and driver.scheduler.stats().num_preemptions < 30:
            driver.scheduler._preempt(chance.choice(running))

    driver.add(*shuffled(asked, 3))
    driver.run(before_step=preempt)
    assert driver.scheduler.stats().num_preemptions > 12
    return driver.samples


def short_of_blocks(driver: Driver, asked: list[Request]) -> Samples:
    driver.add(*shuffled(asked, 4))
    return driver.run()


def twice(driver: Driver, asked: list[Request]) -> Samples:
    """The second time, prompts are found in the cache."""
    for seed in (5, 6):
        for each in shuffled(asked, seed):
            driver.add(each)
            driver.run()
    assert driver.scheduler.stats().prefix_hit_tokens > 50
    return driver.samples


def twice_at_once(driver: Driver, asked: list[Request]) -> Samples:
    for seed in (7, 8):
        driver.add(*shuffled(asked, seed))
        driver.run()
    return driver.samples


def aborting(driver: Driver, asked: list[Request]) -> Samples:
    """A request goes in every third step; the others, and those that come after, are not disturbed."""
    requests = shuffled(asked, 9)
    gone = [f"gone {place}" for place in range(12)]
    doomed = [msgspec.structs.replace(each, request_id=name) for name, each in zip(gone, shuffled(asked, 10), strict=False)]
    for pair in zip(requests, doomed, strict=False):
        driver.add(*pair)
    driver.add(*requests[len(doomed) :])

    def abort(step: int) -> None:
        if step % 3 == 1 and gone:
            driver.abort(gone.pop(step % len(gone)))

    driver.run(before_step=abort)
    assert any(sample.finish_reason == "abort" for each in doomed for sample in driver.samples[each.request_id])
    return {name: samples for name, samples in driver.samples.items() if name in BY_NAME}


@dataclasses.dataclass(frozen=True)
class Way:
    serve: Callable[[Driver, list[Request]], Samples]
    args: dict[str, Any] = dataclasses.field(default_factory=dict)


WAYS = {
    "together": Way(together),
    "without graphs": Way(together, {"enforce_eager": True}),
    "without overlap": Way(together, {"pipeline_depth": 1}),
    "three steps ahead": Way(arriving, {"pipeline_depth": 3}),
    "arriving": Way(arriving),
    "chunks of 20": Way(together, {"max_num_batched_tokens": 20, "max_num_seqs": 16}),
    "chunks of 5": Way(arriving, {"max_num_batched_tokens": 5, "max_num_seqs": 5}),
    "preempted": Way(preempting),
    "preempted in chunks": Way(preempting, {"max_num_batched_tokens": 24, "max_num_seqs": 8}),
    "short of blocks": Way(short_of_blocks, {"num_kv_blocks": 8}),
    "cached": Way(twice, {"enable_prefix_caching": True}),
    "cached, short of blocks": Way(
        twice_at_once, {"enable_prefix_caching": True, "num_kv_blocks": 10, "max_num_batched_tokens": 32}
    ),
    "one slot": Way(one_by_one, {"max_num_seqs": 1}),
    "two slots": Way(together, {"max_num_seqs": 2}),
    "aborting": Way(aborting, {"enable_prefix_caching": True}),
}


def arguments(folder: Path, device: str, dtype: str, **changes: Any) -> EngineArgs:
    """Graphs are captured when they are first needed: each engine here meets few batch sizes."""
    plain: dict[str, Any] = {"num_kv_blocks": 400, "max_num_seqs": 32, "enable_prefix_caching": False, "pipeline_depth": 2}
    plain |= {"max_model_len": MAX_LEN, "quantization": "none", "num_threads": 1, "max_queue_len": 1000}
    plain |= {"graph_capture_seconds": 60.0}
    return EngineArgs(model=str(folder), device=device, dtype=dtype, **plain | changes)


@functools.cache
def expected(folder: Path, device: str, dtype: str, more: tuple[tuple[str, Any], ...] = ()) -> Samples:
    """Every request alone, in plain steps."""
    plain = arguments(folder, device, dtype, enforce_eager=True, pipeline_depth=1, **dict(more))
    with driving(plain) as driver:
        samples = one_by_one(driver, [*REQUESTS, *PLAIN])
    assert all(sample.error is None for each in samples.values() for sample in each)
    return samples


def null_blocks_are_untouched(driver: Driver) -> None:
    """Padded rows of a graph, and tokens without a slot, write nowhere."""
    assert all(not cache.rows[0].any() for cache in driver.runner._caches)


# ------------------------------------------------------------------ what must be the same


def same(found: Samples, wanted: Samples) -> None:
    """Tokens, texts and reasons are equal; logprobs to float32's rounding."""
    for name, where, one, other in pairs(found, wanted):
        parts = ("token_ids", "text", "finish_reason", "error")
        assert all(getattr(one, part) == getattr(other, part) for part in parts), where
        if one.logprobs:
            assert chosen(one) == pytest.approx(chosen(other), abs=EXACT), where
        given = BY_NAME[name].prompt_token_ids
        assert of_prompt(one, given) == pytest.approx(of_prompt(other, given), abs=EXACT), where


def pairs(found: Samples, wanted: Samples) -> list[tuple[str, str, Sample, Sample]]:
    """Request, sample, what was found of it and what was wanted."""
    assert found.keys() <= wanted.keys() and len(found) >= len(PLAIN)
    return [
        (name, f"{name}[{index}]", one, other)
        for name, samples in found.items()
        for index, (one, other) in enumerate(zip(samples, wanted[name], strict=True))
    ]


def differences(found: Samples, wanted: Samples) -> list[float]:
    """Between logprobs of the same tokens after the same tokens: of prompts, and of outputs until they part."""
    return [apart for apart, _ in placed_differences(found, wanted)]


def placed_differences(found: Samples, wanted: Samples) -> list[tuple[float, str]]:
    """And where they are."""
    result: list[tuple[float, str]] = []
    for name, where, one, other in pairs(found, wanted):
        given = BY_NAME[name].prompt_token_ids
        both = list(zip(of_prompt(one, given), of_prompt(other, given), strict=False))
        in_prompt = len(both)
        if one.logprobs:
            tokens = zip(one.token_ids, other.token_ids, strict=False)
            length = next((place for place, (a, b) in enumerate(tokens) if a != b), len(one.token_ids))
            both += zip(chosen(one)[:length], chosen(other)[:length], strict=False)
        for place, (a, b) in enumerate(both):
            if max(a, b) > -20.0:
                part = f"prompt {place}" if place < in_prompt else f"output {place - in_prompt}"
                result.append((abs(a - b), f"{where} {part}: {a:.3f}, not {b:.3f}"))
    return result


def close(found: Samples, wanted: Samples, bound: float = BOUND, mean: float = MEAN) -> None:
    apart = differences(found, wanted)
    assert len(apart) > 300
    worst = "\n".join(where for _, where in sorted(placed_differences(found, wanted), reverse=True)[:12])
    assert max(apart) < bound and statistics.fmean(apart) < mean, worst
    for _, where, one, other in pairs(found, wanted):
        assert one.error is None, where
        if where.startswith("forced"):
            assert one.token_ids == other.token_ids, where


# ------------------------------------------------------------------ tests

families = pytest.mark.parametrize("family", FAMILIES)
ways = pytest.mark.parametrize("way", WAYS)
RECURRENT = ("delta rule", "state space")
"""They remember roundings, so that in bfloat16 they are compared in bits alone, where those must be equal."""
ROUNDED = [EVERY_EXPERT if family == "mixture" else family for family in FAMILIES if family not in RECURRENT]
"""Families that can be compared in bfloat16: which few experts of many are the best is a matter of rounding there, on a CPU
too."""
GROUPS = "groups of 3, width 80"
QUICK: dict[str, tuple[str, ...]] = {GROUPS: ("three steps ahead",), "mla": ()} | dict.fromkeys(RECURRENT, ())
"""Families on the CPU, and the ways that are not slow there: tests/runner has the others over plain steps."""
QUICK_PLAIN = QUICK | {GROUPS: ("together",)}


def on_both(of: Iterable[str], quick: dict[str, tuple[str, ...]], here: Collection[str] = tuple(WAYS)) -> pytest.MarkDecorator:
    """All ways of the families ``of`` on a GPU; on the CPU those of ``here``, of which the ``quick`` ones are not slow."""
    on_cpu = [
        pytest.param("cpu", family, way, marks=() if way in few else pytest.mark.slow)
        for family, few in quick.items()
        for way in here
    ]
    there = [pytest.param("cuda", family, way, marks=CUDA.marks) for family in of for way in WAYS]
    return pytest.mark.parametrize(("device", "family", "way"), [*on_cpu, *there])


@on_both(FAMILIES, QUICK)
def test_float32(family: str, device: str, way: str, folder_of: Callable[[str], Path]) -> None:
    wanted = expected(folder_of(family), device, "float32")
    with driving(arguments(folder_of(family), device, "float32", **WAYS[way].args)) as driver:
        same(WAYS[way].serve(driver, REQUESTS), wanted)
        null_blocks_are_untouched(driver)


@on_both(
    ROUNDED,
    {GROUPS: (), "mla": ()},
    ("together", "chunks of 20", "cached, short of blocks"),
)
def test_bfloat16(family: str, device: str, way: str, folder_of: Callable[[str], Path]) -> None:
    wanted = expected(folder_of(family), device, "bfloat16")
    with driving(arguments(folder_of(family), device, "bfloat16", **WAYS[way].args)) as driver:
        close(WAYS[way].serve(driver, REQUESTS), wanted)
        null_blocks_are_untouched(driver)


@on_both(FAMILIES, QUICK_PLAIN)
def test_plain_float32(family: str, device: str, way: str, folder_of: Callable[[str], Path]) -> None:
    with driving(arguments(folder_of(family), device, "float32", **WAYS[way].args)) as driver:
        same(WAYS[way].serve(driver, PLAIN), expected(folder_of(family), device, "float32"))
        null_blocks_are_untouched(driver)
        graphs_ran(driver, device, way)


@on_both(ROUNDED, {GROUPS: (), "mla": ("together",)}, ("together",))
def test_plain_bfloat16(family: str, device: str, way: str, folder_of: Callable[[str], Path]) -> None:
    """Greedy tokens are as good as the best ones, by float32's account of the same text."""
    with driving(arguments(folder_of(family), device, "bfloat16", **WAYS[way].args)) as driver:
        found = WAYS[way].serve(driver, PLAIN)
        null_blocks_are_untouched(driver)
        graphs_ran(driver, device, way)
    texts = []
    for each in PLAIN:
        (sample,) = found[each.request_id]
        assert len(sample.token_ids) == 30 and sample.finish_reason == "length"
        if each.sampling.greedy:
            texts.append(request(each.request_id, each.prompt_token_ids + sample.token_ids, prompt_logprobs=1, max_tokens=1))
    with driving(arguments(folder_of(family), "cpu", "float32")) as judge:
        judged = together(judge, texts)
    gaps = [gap for each in texts for gap in behind_the_best(judged[each.request_id][0], each.prompt_token_ids)[-30:]]
    assert len(gaps) > 150 and max(gaps) < BOUND and statistics.fmean(gaps) < MEAN


def behind_the_best(sample: Sample, text: list[int]) -> list[float]:
    """Returns by how much each token after the first was less likely than the likeliest."""
    best = [max(entry.logprob for entry in position.values()) for position in sample.prompt_logprobs if position]
    return [top - own for top, own in zip(best, of_prompt(sample, text), strict=True)]


def graphs_ran(driver: Driver, device: str, way: str) -> None:
    """They are captured when they are first launched."""
    if device == "cuda" and way != "without graphs":
        assert isinstance(driver.runner._graphs, StepGraphs) and driver.runner._graphs._captured


@pytest.mark.parametrize(
    ("device", "dtype", "family", "way"),
    [
        *(
            pytest.param("cpu", "float32", "qwen3", way, marks=pytest.mark.slow)
            for way in ("cached, short of blocks", "chunks of 20", "preempted in chunks")
        ),
        *(
            pytest.param("cuda", dtype, family, way, marks=CUDA.marks)
            for dtype in ("float32", "bfloat16")
            for family in IN_FP8
            for way in WAYS
        ),
    ],
)
def test_fp8_kv(family: str, device: str, dtype: str, way: str, folder_of: Callable[[str], Path]) -> None:
    """A token's bytes in the cache are those of its own K and V, which differ by no more than rounding.

    The runner's own tests show most of it on the CPU.
    """
    folder = folder_of(family)
    wanted = expected(folder, device, dtype, tuple(FP8[device].items()))
    with driving(arguments(folder, device, dtype, **WAYS[way].args | FP8[device])) as driver:
        found = WAYS[way].serve(driver, REQUESTS)
        null_blocks_are_untouched(driver)
        if device == "cuda" and way in ("together", "three steps ahead", "chunks of 20"):
            found = WAYS[way].serve(driver, PLAIN)
            graphs_ran(driver, device, way)
    close(found, wanted, *TIPPED[device])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
@pytest.mark.parametrize("family", IN_FP8)
def test_fp8_kv_is_near_the_models_own(family: str, device: str, folder_of: Callable[[str], Path]) -> None:
    if device == "cpu" and family != "qwen3":
        pytest.skip("one family is enough where the formula attends")
    found = expected(folder_of(family), device, "float32", tuple(FP8[device].items()))
    wanted = expected(folder_of(family), "cpu", "float32")
    close(found, wanted, *QUANTISED)
    assert statistics.fmean(differences(found, wanted)) > 0.01, "nothing was rounded"


@pytest.mark.skipif("deterministic" not in EngineArgs.__dataclass_fields__, reason="the engine has no such mode")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [CUDA])
@families
@ways
def test_deterministic(family: str, device: str, dtype: str, way: str, folder_of: Callable[[str], Path]) -> None:
    """Every bit of every logprob."""
    wanted = expected(folder_of(family), device, dtype, (("deterministic", True),))
    changes = WAYS[way].args | {"deterministic": True}
    with driving(arguments(folder_of(family), device, dtype, **changes)) as driver:
        found = WAYS[way].serve(driver, REQUESTS)
        if way in ("together", "three steps ahead", "chunks of 20"):
            found = WAYS[way].serve(driver, PLAIN)
    for name, where, one, other in pairs(found, wanted):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason), where
        if one.logprobs and BY_NAME[name].sampling.logprobs is not None:
            assert one.logprobs == other.logprobs, where
        elif one.logprobs:
            assert chosen(one) == chosen(other), where
        assert one.prompt_logprobs == other.prompt_logprobs, where


@pytest.mark.parametrize("device", [CUDA])
@families
def test_both_devices_agree_in_float32(family: str, device: str, folder_of: Callable[[str], Path]) -> None:
    same(expected(folder_of(family), device, "float32"), expected(folder_of(family), "cpu", "float32"))


@pytest.mark.parametrize(
    ("device", "family"),
    [
        *(pytest.param("cpu", family, marks=pytest.mark.slow) for family in ("mla", EVERY_EXPERT)),
        *(pytest.param("cuda", family, marks=CUDA.marks) for family in ROUNDED),
    ],
)
def test_bfloat16_is_near_float32(family: str, device: str, folder_of: Callable[[str], Path]) -> None:
    close(expected(folder_of(family), device, "bfloat16"), expected(folder_of(family), "cpu", "float32"))


@pytest.mark.parametrize(
    "family", [family if family == GROUPS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_the_features_and_the_cache_matter(family: str, folder_of: Callable[[str], Path]) -> None:
    """Equality of what depends on nothing would prove nothing. That each feature binds is shown where it is tested alone."""
    samples = expected(folder_of(family), "cpu", "float32")
    for name in ("bias", "allowed"):
        own = FEATURES[name]
        plain = request(
            name, own.prompt_token_ids, seed=own.seed, temperature=own.sampling.temperature, max_tokens=own.max_tokens
        )
        with driving(arguments(folder_of(family), "cpu", "float32")) as driver:
            driver.add(plain)
            assert driver.run()[name][0].token_ids != samples[name][0].token_ids, name
    # Another first token far back, and the prompt's last tokens have other logprobs.
    own = BY_NAME["given 17"]
    changed = msgspec.structs.replace(own, prompt_token_ids=[9 + own.prompt_token_ids[0], *own.prompt_token_ids[1:]])
    with driving(arguments(folder_of(family), "cpu", "float32")) as driver:
        driver.add(changed)
        found = of_prompt(driver.run()["given 17"][0], changed.prompt_token_ids)
    wanted = of_prompt(samples["given 17"][0], own.prompt_token_ids)
    assert all(abs(one - other) > 100 * EXACT for one, other in zip(found[-8:], wanted[-8:], strict=True))
