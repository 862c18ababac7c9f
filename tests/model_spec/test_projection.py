"""The matrices around attention, each by its own heads and width, however a checkpoint orders their rows."""

from __future__ import annotations

import pytest
import torch

from headrace.model_spec import AttentionSpec
from headrace.model_spec.projection import grouped_rows, input_matrices, output_matrix


def spec(**changes: object) -> AttentionSpec:
    numbers: dict = {"layer": 4, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "v_head_dim": 3, "scale": 1.0}
    return AttentionSpec(**{**numbers, **changes})


def test_each_matrix_has_its_own_size() -> None:
    sizes = {one.name: one.size for one in (*input_matrices(spec(output_gate=True)), output_matrix(spec()))}
    assert sizes == {"q": 30, "k": 10, "v": 6, "gate": 18, "o": 18}
    assert [one.name for one in input_matrices(spec(kv_source=1))] == ["q"]
    assert [one.name for one in input_matrices(spec(kv_source=1, output_gate=True))] == ["q", "gate"]


def labelled(one: AttentionSpec) -> dict[str, torch.Tensor]:
    """Rows that say what they are: (matrix, head, row of the head)."""
    return {
        matrix.name: torch.tensor([[index, head, row] for head in range(matrix.heads) for row in range(matrix.width)])
        for index, matrix in enumerate(input_matrices(one))
    }


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "dv"), [(6, 2, 5, 3), (9, 3, 4, 7), (4, 4, 2, 2), (5, 1, 3, 8)])
def test_rows_interleaved_by_group(heads: int, kv_heads: int, d: int, dv: int, gate: bool) -> None:
    one = spec(num_heads=heads, num_kv_heads=kv_heads, head_dim=d, v_head_dim=dv, output_gate=gate)
    rows, group = labelled(one), heads // kv_heads
    stored = []
    for index in range(kv_heads):
        queries = slice(index * group * d, (index + 1) * group * d)
        stored.append(rows["q"][queries])
        if gate:
            stored.append(rows["gate"][index * group * dv : (index + 1) * group * dv])
        stored.append(rows["k"][index * d : (index + 1) * d])
        stored.append(rows["v"][index * dv : (index + 1) * dv])
    assert torch.equal(torch.cat(stored)[grouped_rows(one)], torch.cat(list(rows.values())))
