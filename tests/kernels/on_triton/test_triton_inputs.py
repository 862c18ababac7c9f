"""A step's inputs against their twin, and against what they mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels import inputs as twin
from headrace.kernels.triton import inputs

SLOTS, LONGEST, BLOCK_SIZE = 6, 700, 8


@dataclasses.dataclass
class Tables:
    token_ids: torch.Tensor
    num_computed: torch.Tensor
    groups: list[torch.Tensor]


def tables(groups: int = 1) -> Tables:
    generator = torch.Generator().manual_seed(0)
    shape = (SLOTS, LONGEST // BLOCK_SIZE)
    return Tables(
        token_ids=torch.randint(1, 50_000, (SLOTS, LONGEST), generator=generator, dtype=torch.int32),
        num_computed=torch.randint(0, 80, (SLOTS,), generator=generator),
        # The null block where a window has passed by.
        groups=[torch.randint(0, 5, shape, generator=generator, dtype=torch.int32) * 1000 for _ in range(groups)],
    )


def run(
    module: object, made: Tables, rows: list[tuple[int, int]], device: torch.device | str, rest: int = 0, wide: int = 0
) -> twin.StepInputs:
    """``rows`` of (slot, queries)."""
    counts = torch.tensor([count for _, count in rows], dtype=torch.int64)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    longest = max([int(made.num_computed[slot]) + count for slot, count in rows if slot >= 0], default=1)
    return module.step_inputs(  # type: ignore[attr-defined]
        made.token_ids.to(device),
        made.num_computed.to(device),
        [group.to(device) for group in made.groups],
        torch.tensor([slot for slot, _ in rows], dtype=torch.int64, device=device),
        starts.to(device),
        num_tokens=int(counts.sum()) + rest,
        max_queries=max([count for _, count in rows], default=1),
        table_width=-(-longest // BLOCK_SIZE) + wide,
        block_size=BLOCK_SIZE,
    )


def same(got: twin.StepInputs, expected: twin.StepInputs) -> None:
    for field in dataclasses.fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        for one, other in zip(a, b, strict=True) if isinstance(b, tuple) else [(a, b)]:
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other), field.name


CASES = {
    "decode": [(3, 1), (0, 1), (5, 1)],
    "mixed": [(1, 1), (4, 1), (2, 37), (0, 600)],
    "nobody's rows": [(2, 1), (-1, 1), (-1, 1)],
    "rows without queries": [(2, 0), (1, 5), (0, 0)],
    "no rows": [],
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rest", [0, 300])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_matches_the_twin(rows: list[tuple[int, int]], rest: int, groups: int, device: torch.device) -> None:
    made = tables(groups)
    same(run(inputs, made, rows, device, rest, wide=2), run(twin, made, rows, "cpu", rest, wide=2))


def test_the_twin_by_hand() -> None:
    made = tables(2)
    rows = [(3, 1), (-1, 1), (1, 20)]
    got = run(twin, made, rows, "cpu", rest=2)
    token = 0
    for row, (slot, count) in enumerate(rows):
        start = int(made.num_computed[slot]) if slot >= 0 else 0
        assert got.seq_lens[row] == (start + count if slot >= 0 else 0)
        for position in range(start, start + count):
            if slot < 0:
                assert (got.ids[token], got.positions[token]) == (0, 0)
                assert all(mapping[token] == -1 for mapping in got.slot_mapping)
            else:
                assert (got.ids[token], got.positions[token]) == (made.token_ids[slot, position], position)
                for group, mapping in zip(made.groups, got.slot_mapping, strict=True):
                    block = int(group[slot, position // BLOCK_SIZE])
                    assert mapping[token] == (block * BLOCK_SIZE + position % BLOCK_SIZE if block else -1)
            token += 1
        for group, table in zip(made.groups, got.block_tables, strict=True):
            expected = group[slot, : table.shape[1]] if slot >= 0 else torch.zeros(table.shape[1])
            assert torch.equal(table[row], expected.int())
    assert token == len(got.ids) - 2
    assert got.ids[token:].tolist() == [0, 0] and got.slot_mapping[0][token:].tolist() == [-1, -1]


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_advance(rows: int, device: torch.device) -> None:
    """Rows that draw, rows that do not, rows whose logits are not finite, and nobody's."""
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows + 3, generator=generator)[:rows].int()
    slots[torch.rand(rows, generator=generator) < 0.2] = -1
    best = torch.randn(rows, generator=generator)
    best[torch.rand(rows, generator=generator) < 0.2] = torch.nan
    best[torch.rand(rows, generator=generator) < 0.1] = -torch.inf
    drawn = torch.randint(0, 100, (rows,), generator=generator)
    lengths = torch.randint(1, 8, (rows,), generator=generator).int()
    draws = (torch.rand(rows, generator=generator) < 0.7).int()
    state = [torch.full((rows + 3, 9), 7, dtype=torch.int32), torch.full((rows + 3,), 5), torch.full((rows + 3,), 4)]
    there = [tensor.to(device, copy=True) for tensor in state]
    given = [slots, draws, lengths, drawn, best]
    expected = twin.advance(*given, *state)
    got = inputs.advance(*(tensor.to(device) for tensor in given), *there)
    assert torch.equal(got.cpu(), expected)
    for here, elsewhere in zip(state, there, strict=True):
        assert torch.equal(elsewhere.cpu(), here)
