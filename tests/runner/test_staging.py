"""Staged writes against writing at once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runner.slots import StagedTable

ROWS, WIDTH = 5, 12
runs = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, WIDTH - 1), st.lists(st.integers(-5, 99), max_size=WIDTH)), max_size=6
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(runs, max_size=4))
def test_staged_writes_are_writes(steps: list[list[tuple[int, int, list[int]]]]) -> None:
    table = StagedTable(ROWS, WIDTH, torch.device("cpu"))
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    for step in steps:
        written: set[tuple[int, int]] = set()
        for row, start, values in step:
            values = values[: WIDTH - start]
            cells = {(row, start + i) for i in range(len(values))}
            if cells & written:
                continue
            written |= cells
            table.stage(row, start, values)
            expected[row, start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
        table.apply()
        assert torch.equal(table.tensor, expected)


def test_cleared_rows_are_zero() -> None:
    table = StagedTable(ROWS, WIDTH, torch.device("cpu"))
    for row in range(ROWS):
        table.stage(row, 0, [7] * WIDTH)
    table.apply()
    table.clear(torch.tensor([1, 3]))
    table.stage(3, 2, [9])
    table.apply()
    assert table.tensor.sum(1).tolist() == [84, 0, 84, 9, 84]
