"""Each feature against its plain reference, alone, in company, and in a slot that somebody else had before."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.sampling
from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.options import FLOAT32_MAX, FLOAT32_TINY
from headrace.sampling.allowed import AllowedTokens
from headrace.sampling.bad_words import BadWords
from headrace.sampling.feature import Feature
from headrace.sampling.logprobs import ALL
from headrace.sampling.penalties import Penalties
from headrace.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED
from headrace.sampling_params import SamplingParams
from headrace.text.vocab import TokenBytes

from .reference import CPU, Bench, probabilities, processed_logits, sequence

VOCAB = 300
EOS = [1, 2]
TOKEN_BYTES = TokenBytes(
    tuple([b"<pad>", b"<eos>", b"<sep>"] + [bytes([97 + i % 3]) * (1 + i % 2) + bytes([97 + i // 9 % 3]) for i in range(280)]),
    frozenset({0, 1, 2}),
)
"""Few letters, so that words come to be in many ways; the model has more tokens than the tokenizer."""

FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 4.0, 299: -100.0, 17: 2.5}},
    "allowed": {"allowed_token_ids": [1, 2, 9, 30, 31, 250]},
    "min tokens": {"min_tokens": 3, "stop_token_ids": [40, 41, 42], "max_tokens": 20},
    "bad words": {"bad_words": ["aba", "cc", "bcab"]},
    "bad words and special": {"bad_words": ["s>a", "<p", "bb"], "skip_special_tokens": False},
    "filters": {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "everything": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {5: 4.0, 1: 9.0},
        "allowed_token_ids": list(range(1, 200)),
        "min_tokens": 4,
        "bad_words": ["ab", "ca"],
        "top_k": 25,
        "top_p": 0.9,
    },
}


def params_of(name: str, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.9, "logprobs": ALL, "logprobs_mode": "processed"}
    return SamplingParams(**fields | FEATURES[name] | changes)


def make(name: str, slot: int = 0, outputs: list[int] | None = None, **changes: Any) -> NewSequence:
    chance = random.Random(name)
    prompt = [chance.randrange(VOCAB) for _ in range(25)]
    params = params_of(name, **changes)
    return sequence(params, prompt, outputs or [], slot=slot, seed=slot, eos=EOS, token_bytes=TOKEN_BYTES)


def logits_of(step: int, row: int = 0) -> torch.Tensor:
    """Some tokens are seen often enough to be penalised several times."""
    generator = torch.Generator().manual_seed(1000 * step + row)
    logits = torch.randn(VOCAB, generator=generator) * 1.5
    logits[::50] += 3.0
    return logits


def expected(seq: NewSequence, outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
    prompt = seq.token_ids[: seq.prompt_len]
    row = processed_logits(logits, seq.sampling, prompt, outputs, EOS, TOKEN_BYTES)
    return probabilities(row, seq.sampling)


def reported(entry: Any) -> torch.Tensor:
    shares = torch.zeros(VOCAB, dtype=torch.float64)
    shares[entry.token_ids[1:]] = torch.tensor(entry.logprobs[1:], dtype=torch.float64).exp()
    return shares


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert ((found > 1e-37) == (wanted > 1e-37)).all()
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-9)


def leaves(kind: type[Feature]) -> Iterator[type[Feature]]:
    """Classes of the package below ``kind`` that have no subclasses."""
    below = [one for one in kind.__subclasses__() if one.__module__.startswith("headrace.")]
    for one in below:
        yield from leaves(one)
    if not below:
        yield kind


def test_the_sampler_has_every_feature() -> None:
    for module in pkgutil.iter_modules(headrace.sampling.__path__, "headrace.sampling."):
        importlib.import_module(module.name)
    assert {type(feature) for feature in Bench(VOCAB).sampler._features} == set(leaves(Feature))


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_its_reference_step_by_step(name: str) -> None:
    seq = make(name)
    bench = Bench(VOCAB, TOKEN_BYTES)
    bench.add(seq)
    outputs: list[int] = []
    for step in range(12):
        sampled = bench.step(logits_of(step).unsqueeze(0), [0])
        wanted = expected(seq, outputs, logits_of(step))
        check(reported(sampled.lists()[0]), wanted)
        outputs.append(int(sampled.tokens))
        assert wanted[outputs[-1]] > 0
    text = b"".join(
        TOKEN_BYTES.pieces[t] if not seq.sampling.skip_special_tokens else TOKEN_BYTES.visible[t] for t in outputs if t < 283
    )
    assert not any(word.encode() in text for word in seq.sampling.bad_words or [])


def run(bench: Bench, place: int, slots: list[int], steps: int) -> list[int]:
    """Returns the tokens that the row of ``place`` samples; its logits are those of row 0 wherever it stands."""
    sampled = []
    for step in range(steps):
        batch = [logits_of(step, 0 if row == place else row + 1) for row in range(len(slots))]
        sampled.append(int(bench.step(torch.stack(batch), slots).tokens[place]))
    return sampled


@pytest.mark.parametrize("name", FEATURES)
def test_company_and_a_used_slot_change_nothing(name: str) -> None:
    """Beside all other features, in every slot; each slot had another feature before, with outputs of its own."""
    alone = Bench(VOCAB, TOKEN_BYTES)
    alone.add(make(name, slot=0))
    wanted = run(alone, 0, [0], 8)
    bench = Bench(VOCAB, TOKEN_BYTES, slots=len(FEATURES))
    names = list(FEATURES)
    for turn in range(2):
        order = names[turn + 1 :] + names[: turn + 1]
        for slot, other in enumerate(order):
            bench.add(make(other, slot=slot))
        if turn == 0:
            run(bench, 0, list(range(len(names))), 5)
            for slot in range(len(names)):
                bench.remove(slot)
    place = order.index(name)
    bench.remove(place)
    own = make(name, slot=0)
    bench.add(NewSequence(99, place, own.token_ids, own.prompt_len, own.sampling, own.seed, 0, EOS, own.bad_words))
    assert run(bench, place, list(range(len(names))), 8) == wanted


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("at", [1, 4, 7])
def test_resuming_with_outputs_changes_nothing(name: str, at: int) -> None:
    whole = Bench(VOCAB, TOKEN_BYTES)
    whole.add(make(name))
    wanted = run(whole, 0, [0], 10)
    resumed = Bench(VOCAB, TOKEN_BYTES)
    resumed.add(make(name, outputs=wanted[:at]))
    found = [int(resumed.step(logits_of(step).unsqueeze(0), [0]).tokens) for step in range(at, 10)]
    assert found == wanted[at:]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    repetition=st.floats(0.3, 3.0),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
    temperature=st.sampled_from([0.0, 0.5, 2.0]),
    prompt=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    outputs=st.lists(st.integers(0, 40), max_size=30),
)
def test_penalties_of_any_strength(
    repetition: float, presence: float, frequency: float, temperature: float, prompt: list[int], outputs: list[int]
) -> None:
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=ALL,
        logprobs_mode="processed",
    )
    bench = Bench(VOCAB)
    bench.add(sequence(params, prompt, outputs))
    sampled = bench.step(logits_of(0).unsqueeze(0), [0])
    row = processed_logits(logits_of(0), params, prompt, outputs)
    token = int(sampled.tokens)
    if temperature == 0.0:
        assert row[token] == pytest.approx(float(row.max()), abs=1e-5)
        row = torch.full_like(row, -torch.inf).index_fill(0, torch.tensor([token]), 0.0)
    check(reported(sampled.lists()[0]), (row / (temperature or 1.0)).softmax(-1))


def test_histograms_are_made_when_needed_and_shared_in_turn() -> None:
    penalties = Penalties(256, 150_000, CPU)
    plain = sequence(SamplingParams())
    for slot in range(256):
        penalties.add(slot, plain)
    assert penalties.nbytes == 0
    fined = sequence(SamplingParams(presence_penalty=1.0), [5, 6], [7])
    penalties.add(200, fined)
    first = penalties.nbytes
    assert 0 < first < 8 * 4 * 150_000
    for slot in range(200):
        penalties.add(slot, fined)
        penalties.remove(slot)
    assert penalties.nbytes == first


def test_long_sequences_have_room_for_what_they_see() -> None:
    """The lists of seen tokens grow, those of other rows with them."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0)
    bench = Bench(2000)
    bench.add(sequence(params, [3], slot=0))
    bench.add(sequence(params, list(range(1000, 1250)), slot=1))
    logits = torch.arange(2000).float().expand(2, -1) / 100
    seen: list[list[int]] = [[], []]
    for _ in range(600):
        for row, token in enumerate(bench.step(logits, [0, 1]).tokens.tolist()):
            seen[row].append(token)
    bench.add(sequence(params, list(range(900)), slot=2))
    assert seen[0] == seen[1]
    for row in range(2):
        outputs = seen[row]
        last = processed_logits(logits[0], params, [3], outputs[:-1])
        assert outputs[-1] == int(last.argmax())
    assert int(bench.step(logits[:1], [2]).tokens) == 1999


def test_samples_share_what_their_request_lists() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[2, 3, 5], bad_words=["x"])
    table = TokenBytes([b"x", b"a", b"xa", b"b", b"ax", b"c"], frozenset())
    bench = Bench(6, table)
    first = sequence(params, token_bytes=table)
    for slot in range(4):
        bench.add(msgspec.structs.replace(first, slot=slot))
    assert bench.step(torch.arange(6).flip(0).float().expand(4, -1), [0, 1, 2, 3]).tokens.tolist() == [3] * 4
    allowed, bad_words = (next(f for f in bench.sampler._features if type(f) is kind) for kind in (AllowedTokens, BadWords))
    assert len({id(automaton) for automaton in bad_words._automatons.values()}) == 1
    assert len(bad_words._current_tables().transitions) == 256 * first.bad_words.num_states
    for slot in range(4):
        bench.sampler.remove(slot)
    assert allowed._masks._last is None and bad_words._masks._last is None


def test_min_tokens_bans_until_then_and_not_longer() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    bench = Bench(10)
    bench.add(sequence(params, eos=[1]))
    logits = torch.tensor([[0.0, 9, 1, 0, 0, 0, 0, 8, 0, 0]])
    assert [int(bench.step(logits, [0]).tokens) for _ in range(4)] == [2, 2, 1, 1]
    bench.add(sequence(SamplingParams(temperature=0.0, min_tokens=2), [0], [2, 2], slot=1, eos=[1]))
    assert int(bench.step(logits, [1]).tokens) == 1


def test_a_stop_token_that_the_model_lacks_is_no_matter() -> None:
    bench = Bench(10)
    bench.add(sequence(SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[99]), eos=[1]))
    assert int(bench.step(torch.tensor([[0.0, 9, 1, 0, 0, 0, 0, 8, 0, 0]]), [0]).tokens) == 7


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_row_that_has_no_sense_fails_alone(params: dict[str, Any]) -> None:
    bench = Bench(VOCAB)
    for slot in range(5):
        bench.add(sequence(SamplingParams(**params, logprobs=2), slot=slot, seed=slot))
    bench.add(sequence(SamplingParams(**params, allowed_token_ids=[4], logit_bias={4: 1.0}), slot=5))
    bench.add(sequence(SamplingParams(**params, allowed_token_ids=[4], min_tokens=1, stop_token_ids=[4]), slot=6))
    logits = torch.stack([logits_of(0, row) for row in range(7)])
    logits[0, 77] = torch.nan
    logits[1, 77] = torch.inf
    logits[2] = -torch.inf
    logits[3, 100:] = -torch.inf  # Padding columns are not a fault.
    sampled = bench.step(logits, list(range(7)))
    assert sampled.errors() == {0: NOT_FINITE, 1: NOT_FINITE, 2: NOT_FINITE, 6: NOTHING_ALLOWED}
    assert sampled.tokens[[0, 1, 2, 6]].tolist() == [0] * 4
    assert sampled.tokens[3] < 100 and sampled.tokens[5] == 4
    alone = Bench(VOCAB)
    alone.add(sequence(SamplingParams(**params), seed=4))
    assert int(alone.step(logits[4:5], [0]).tokens) == int(sampled.tokens[4])


class Failing:
    """Fails at the ``nth`` upload: at every place in turn where memory may run out while a sequence is taken in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.left = nth
        for module in ("token_lists", "penalties", "bad_words"):
            monkeypatch.setattr(f"headrace.sampling.{module}.upload", self.upload)

    def upload(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no memory for this sequence")
        return upload(*args)


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "none"])
def test_a_sequence_that_cannot_be_taken_in_leaves_nothing_behind(name: str) -> None:
    alone = Bench(VOCAB, TOKEN_BYTES)
    alone.add(make("everything", slot=0))
    wanted = run(alone, 0, [0], 6)
    again = Bench(VOCAB, TOKEN_BYTES)
    again.add(make(name, slot=0))
    wanted_again = run(again, 0, [0], 6)
    for nth in itertools.count():
        bench = Bench(VOCAB, TOKEN_BYTES)
        bench.add(make("everything", slot=0))
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, nth)
            try:
                bench.add(make(name, slot=1))
            except MemoryError:
                pass
            else:
                assert failing.left >= 0
                break
        assert bench.sampler.plain(np.array([1])) and not bench.sampler.filters(np.array([1]))
        # Its rows are sampled until the scheduler hears of the failure.
        assert run(bench, 0, [0, 1], 6) == wanted
        bench.remove(1)
        bench.remove(0)
        bench.add(make(name, slot=0))
        assert run(bench, 0, [0], 6) == wanted_again, "the next sequence in its place finds nothing of it"


@pytest.mark.parametrize("penalty", [FLOAT32_TINY, 1e-30, 1e30, FLOAT32_MAX], ids=repr)
@pytest.mark.parametrize("logit", [-8.0, -1e-30, 1e-30, 8.0])
def test_no_penalty_bans_a_token_or_unbans_one(penalty: float, logit: float) -> None:
    """Whatever it does to a logit, the row stays one that can be sampled, and its bans stay bans."""
    for extra in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        bench = Bench(8)
        params = SamplingParams(repetition_penalty=penalty, allowed_token_ids=[3, 4], logprobs=1, **extra)
        bench.add(sequence(params, [1, 3, 4]))
        sampled = bench.step(torch.full((1, 8), logit), [0])
        assert not sampled.errors() and int(sampled.tokens) in (3, 4)


def test_the_penalties_see_biased_logits() -> None:
    """The order: what may come, then penalties. A bias that makes a logit positive is divided."""
    params = SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0, logprobs=ALL, logprobs_mode="processed")
    bench = Bench(4)
    bench.add(sequence(params, [3]))
    entry = bench.step(torch.tensor([[0.0, 0.0, 0.0, -1.0]]), [0]).lists()[0]
    shares = dict(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True))
    assert shares[3] - shares[0] == pytest.approx(2.0)
