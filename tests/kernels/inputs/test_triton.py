"""A step's inputs against their reference, and against what they mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.inputs import reference as ref
from headrace.kernels.inputs import triton as inputs

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
) -> ref.StepInputs:
    """``rows`` of (slot, queries)."""
    counts = torch.tensor([count for _, count in rows], dtype=torch.int64)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    longest = max([int(made.num_computed[slot]) + count for slot, count in rows if slot >= 0], default=1)
    return module.step_inputs(
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


def same(got: ref.StepInputs, expected: ref.StepInputs) -> None:
    for field in dataclasses.fields(expected):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        for one, other in zip(a, b, strict=True) if isinstance(b, tuple) else [(a, b)]:
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other), field.name


CASES = {
    "decode": [(3, 1), (0, 1), (5, 1)],
    "mixed": [(1, 1), (4, 1), (2, 37), (0, 600)],
    "padding rows": [(2, 1), (-1, 1), (-1, 1)],
    "rows without queries": [(2, 0), (1, 5), (0, 0)],
    "no rows": [],
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rest", [0, 300])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_matches_the_ref(rows: list[tuple[int, int]], rest: int, groups: int, device: torch.device) -> None:
    made = tables(groups)
    same(run(inputs, made, rows, device, rest, wide=2), run(ref, made, rows, "cpu", rest, wide=2))


def test_the_reference_by_hand() -> None:
    made = tables(2)
    rows = [(3, 1), (-1, 1), (1, 20)]
    got = run(ref, made, rows, "cpu", rest=2)
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


def logits_case(
    rows: list[tuple[int, int, int]], rest: int, width: int
) -> tuple[torch.Tensor, ref.RowTensors, list[torch.Tensor]]:
    """``rows`` of (slot, queries, logits rows). Hidden states, the rows, and (seq_lens, num_computed)."""
    generator = torch.Generator().manual_seed(len(rows))
    array = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    starts = torch.nn.functional.pad(array[:, 1:].cumsum(0), (0, 0, 1, 0)).int()
    tensors = ref.RowTensors(array[:, 0].int(), starts[:, 0].contiguous(), starts[:, 1].contiguous())
    hidden = torch.randn(int(starts[-1, 0]) + rest, width, generator=generator)
    hidden[torch.rand(len(hidden), generator=generator) < 0.2, width // 2] = torch.nan
    hidden[torch.rand(len(hidden), generator=generator) < 0.1, 0] = torch.inf
    computed = torch.randint(0, 50, (400,), generator=generator)
    lengths = torch.where(array[:, 0] >= 0, computed[array[:, 0].clamp(min=0)] + array[:, 1], 0).int()
    return hidden, tensors, [lengths, computed]


LOGITS_CASES = {
    "decode": [(slot, 1, 1) for slot in (3, 0, 5)],
    "padding": [(2, 1, 1), (7, 1, 1), (-1, 1, 0), (-1, 1, 0)],
    "some sample": [(9, 1, 1), (4, 1, 1), (-1, 1, 0), (2, 37, 1), (0, 50, 0), (-1, 0, 0)],
    "drafts": [(1, 3, 3), (0, 1, 1), (5, 20, 2), (6, 4, 4)],
    "as many tokens as rows": [(1, 1, 1), (-1, 0, 0), (2, 2, 1)],
    "many": [(300 - slot, 1, slot % 2) for slot in range(270)],
}


@pytest.mark.parametrize(("width", "rest"), [(40, 0), (5000, 0), (64, 9)])
@pytest.mark.parametrize("rows", LOGITS_CASES.values(), ids=LOGITS_CASES)
def test_logits_inputs(rows: list[tuple[int, int, int]], rest: int, width: int, device: torch.device) -> None:
    hidden, tensors, (lengths, computed) = logits_case(rows, rest, width)
    single = not rest and all(count == 1 for _, count, _ in rows)
    outs, counters = [], []
    for module, where in ((ref, torch.device("cpu")), (inputs, device)):
        out = ref.LogitsInputs(
            torch.full((300, width), 7.0, device=where),
            torch.full((300,), 7, device=where),
            torch.full((300,), 7, device=where),
            torch.full((300, 2), 7, dtype=torch.int32, device=where),
        )
        counter = computed.to(where, copy=True)
        there = ref.RowTensors(*(tensor.to(where) for tensor in tensors))
        module.logits_inputs(hidden.to(where), there, lengths.to(where), counter, out, single=single)
        outs.append(out)
        counters.append(counter.cpu())
    # By hand.
    place = token = 0
    want = computed.clone()
    for row, (slot, count, logits) in enumerate(rows):
        own = hidden[token : token + count]
        if count:
            assert outs[0].outcome[row, 1] == int(not own.isfinite().all())
        for back in range(logits, 0, -1):
            assert torch.equal(outs[0].hidden[place].nan_to_num(), own[count - back].nan_to_num())
            assert (outs[0].slots[place], outs[0].positions[place]) == (slot, lengths[row] - back + 1)
            place += 1
        token += count
        if slot >= 0:
            want[slot] = lengths[row]
    assert (outs[0].slots[place:] == -1).all() and torch.equal(counters[0], want)
    assert torch.equal(counters[1], want) and (outs[0].outcome[:, 0] == 7).all()
    for name in ref.LogitsInputs._fields:
        found, expected = (getattr(out, name).cpu() for out in reversed(outs))
        if name == "outcome":
            used = torch.tensor([count > 0 for _, count, _ in rows] + [True] * (300 - len(rows)))
            found, expected = found[used], expected[used]
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), name


@pytest.mark.parametrize("rows", [1, 130])
def test_the_outcome_is_fetched(rows: int, device: torch.device) -> None:
    outcome = torch.randint(1, 1000, (rows + 1, 2), dtype=torch.int32, device=device)
    host = torch.zeros(rows + 2, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
    inputs.fetch(outcome[:rows], host[1 : rows + 1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[1 : rows + 1], outcome[:rows].cpu()) and not host[0].any() and not host[-1].any()
