"""Drawing tokens against the sampler's own arithmetic."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from headrace.kernels.sampling import triton_sample as module
from headrace.kernels.sampling.triton_sample import sample
from headrace.sampling.random import uniform
from headrace.sampling.vocabulary import pick_wide

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:divide by zero", "ignore:overflow", "ignore:All-NaN slice"
)

VOCABS = [7, 128, 1000, 4096, 9001]


def words(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, 1 << 32, (count, 3), generator=generator)
    keys[0] = torch.tensor([0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF])
    keys[1:, 2] %= 100
    return keys, torch.randint(0, 200_000, (count,), generator=generator)


@triton.jit
def _numbers(keys, positions, out, COUNT: tl.constexpr):
    row = tl.arange(0, COUNT)
    numbers = module.uniform(
        tl.load(keys + row * 3), tl.load(keys + row * 3 + 1), tl.load(keys + row * 3 + 2), tl.load(positions + row)
    )
    tl.store(out + row, numbers)


def test_the_same_numbers_to_the_last_bit(device: torch.device) -> None:
    keys, positions = words(256)
    out = torch.empty(256, dtype=torch.float64, device=device)
    _numbers[(1,)](keys.to(device), positions.to(device), out, COUNT=256)
    expected = uniform(keys, positions)
    assert torch.equal(out.cpu(), expected)
    assert 0 <= expected.min() < 0.02 and 0.98 < expected.max() < 1


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_best_token(vocab: int, device: torch.device) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(6, vocab)
    logits[0] = 3.0
    logits[1, vocab // 2] = logits[1, -1] = 50.0
    logits[2, 1:] = -torch.inf
    logits[3] *= 1000
    got = sample(logits.to(device))
    assert torch.equal(got.tokens.cpu(), logits.argmax(-1))
    assert torch.equal(got.best.cpu(), logits.amax(-1))
    torch.testing.assert_close(got.log_sums.cpu(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_broken_rows_stay_alone(device: torch.device) -> None:
    logits = torch.randn(5, 5000)
    logits[0, 4500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    keys, positions = words(5)
    for temperatures in (None, torch.ones(5).to(device)):
        got = sample(logits.to(device), temperatures, keys.to(device), positions.to(device))
        best = got.best.cpu()
        assert best[0].isnan() and best[1] == -torch.inf and best[2] == torch.inf
        assert torch.equal(best[3:], logits[3:].amax(-1))
        assert ((got.tokens >= 0) & (got.tokens < 5000)).all()
    assert got.log_sums[3:].isfinite().all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_as_the_sampler_does(vocab: int, device: torch.device) -> None:
    """The same numbers give the same tokens; temperature 0 among them gives the best."""
    torch.manual_seed(vocab)
    count = 32
    logits = 2 * torch.randn(count, vocab)
    logits[:, 1] = -torch.inf
    keys, positions = words(count)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1e-30]).repeat(count // 4).double()
    got = sample(logits.to(device), temperatures.to(device), keys.to(device), positions.to(device)).tokens.cpu()
    best = logits.amax(-1, keepdim=True)
    weights = ((logits - best) / temperatures.float().clamp(min=1e-30).unsqueeze(1)).exp()
    expected = torch.where(temperatures > 0, pick_wide(weights, uniform(keys, positions)), logits.argmax(-1))
    assert torch.equal(got, expected)
    assert (got != 1).all() and len(set(got.tolist())) > min(vocab, count) // 5


def test_no_rows(device: torch.device) -> None:
    assert sample(torch.empty(0, 100, device=device)).tokens.shape == (0,)


@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_take_their_tokens(rows: int, temperature: float, device: torch.device) -> None:
    """Rows whose logits are not finite, banned rows, and padding rows."""
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows + 3, generator=generator)[:rows]
    slots[torch.rand(rows, generator=generator) < 0.2] = -1
    logits = torch.randn(rows, 300, generator=generator)
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[torch.rand(rows, generator=generator) < 0.1] = value
    positions = torch.randint(1, 8, (rows,), generator=generator)
    temperatures, keys = torch.full((rows + 3,), temperature), torch.randint(0, 2**32, (rows + 3, 3), generator=generator)
    given = [tensor.to(device) for tensor in (logits, temperatures, keys, positions, slots)]
    state = [torch.full((rows + 3, 9), 7, dtype=torch.int32), torch.full((rows + 3,), 5), torch.full((rows, 2), 4).int()]
    taken = module.SlotTokens(*(tensor.to(device, copy=True) for tensor in state))
    sampled = sample(*given, advances=taken)
    tokens = sample(*given).tokens.cpu()
    for row, slot in enumerate(slots.tolist()):
        fine = bool(sampled.best[row].isfinite())
        state[2][row, 0] = tokens[row] if fine and slot >= 0 else -1
        if slot >= 0:
            state[0][slot, positions[row]] = tokens[row] if fine else 0
            state[1][slot] = positions[row] + 1
    for found, expected in zip(taken, state, strict=True):
        assert torch.equal(found.cpu(), expected)
