"""The parts of 1, 2, 4 and 8 ranks make up the whole, each matrix cut by its width, and compute what the whole does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec, DenseSpec
from headrace.model_spec.projection import input_matrices, output_matrix
from headrace.parallel.shards import attention_cuts, dense_cuts, join, shard_attention, shard_dense

RANKS = (1, 2, 4, 8)
HIDDEN = 12


def spec(**changes: object) -> AttentionSpec:
    numbers: dict = {"layer": 3, "num_heads": 24, "num_kv_heads": 2, "head_dim": 6, "v_head_dim": 4, "scale": 0.4}
    return AttentionSpec(**{**numbers, **changes})


def weights(one: AttentionSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        matrix.name: torch.randn(matrix.size, HIDDEN, generator=generator, dtype=torch.float64)
        for matrix in input_matrices(one)
    }
    made["o"] = torch.randn(HIDDEN, output_matrix(one).size, generator=generator, dtype=torch.float64)
    if one.sinks:
        made["sinks"] = torch.randn(one.num_heads, generator=generator, dtype=torch.float64)
    return made


def attend(one: AttentionSpec, held: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence with its projections, by the spec's numbers alone."""

    def heads(name: str, count: int, width: int) -> torch.Tensor:
        return functional.linear(x, held[name]).view(len(x), count, width)

    q = heads("q", one.num_heads, one.head_dim)
    k = heads("k", one.num_kv_heads, one.head_dim).repeat_interleave(one.group_size, 1)
    v = heads("v", one.num_kv_heads, one.v_head_dim).repeat_interleave(one.group_size, 1)
    logits = one.scale * torch.einsum("qhd,khd->hqk", q, k)
    mass = logits.exp().tril()
    total = mass.sum(-1, keepdim=True)
    if one.sinks:
        total = total + held["sinks"].exp()[:, None, None]
    out = torch.einsum("hqk,khd->qhd", mass / total, v)
    if one.output_gate:
        out = out * torch.sigmoid(heads("gate", one.num_heads, one.v_head_dim))
    return functional.linear(out.flatten(1), held["o"])


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("changes", [{}, {"output_gate": True, "sinks": True}, {"v_head_dim": 10}], ids=str)
def test_ranks_make_up_the_whole(size: int, kv_heads: int, changes: dict) -> None:
    one = spec(num_kv_heads=kv_heads, **changes)
    whole = weights(one)
    cuts = [attention_cuts(one, rank, size) for rank in range(size)]
    for name, weight in whole.items():
        parts = [rank[name].of(weight) for rank in cuts]
        assert torch.equal(join([rank[name] for rank in cuts], parts), weight)
    local = shard_attention(one, size)
    for matrix in (*input_matrices(local), output_matrix(local)):
        for rank in cuts:
            assert rank[matrix.name].stop - rank[matrix.name].start == matrix.size
    x = torch.randn(7, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = sum(attend(local, {name: rank[name].of(weight) for name, weight in whole.items()}, x) for rank in cuts)
    torch.testing.assert_close(total, attend(one, whole, x))


def test_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    """Two KV heads on eight ranks: four neighbours hold the same one, K by its width and V by its own."""
    one = spec()
    cuts = [attention_cuts(one, rank, 8) for rank in range(8)]
    assert [(rank["k"].start, rank["k"].stop) for rank in cuts] == [(0, 6)] * 4 + [(6, 12)] * 4
    assert [(rank["v"].start, rank["v"].stop) for rank in cuts] == [(0, 4)] * 4 + [(4, 8)] * 4
    assert [rank["q"].start for rank in cuts] == [rank * 18 for rank in range(8)]
    assert [rank["o"].start for rank in cuts] == [rank * 12 for rank in range(8)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_layer_is_cut_and_joined(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(RANKS))
    kv_heads = data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16]))
    group = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
    one = spec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=data.draw(st.integers(1, 9)),
        v_head_dim=data.draw(st.integers(1, 9)),
        output_gate=data.draw(st.booleans()),
    )
    fits = one.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    if not fits:
        with pytest.raises(ConfigError, match=rf"layer 3: .* to {size} ranks"):
            attention_cuts(one, 0, size)
        return
    cuts = [attention_cuts(one, rank, size) for rank in range(size)]
    for name, weight in weights(one).items():
        assert torch.equal(join([rank[name] for rank in cuts], [rank[name].of(weight) for rank in cuts]), weight)


@pytest.mark.parametrize("size", RANKS)
def test_a_gated_mlp_is_cut_and_joined(size: int) -> None:
    one = DenseSpec(40)
    generator = torch.Generator().manual_seed(0)
    gate, up, down, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((40, 6), (40, 6), (6, 40), (5, 6))
    )
    cuts = [dense_cuts(one, rank, size) for rank in range(size)]

    def mlp(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    total = sum(mlp(rank["gate"].of(gate), rank["up"].of(up), rank["down"].of(down)) for rank in cuts)
    torch.testing.assert_close(total, mlp(gate, up, down))
    assert shard_dense(one, size).intermediate_size == 40 // size


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 3: 24 query heads cannot be dealt to 5 ranks") as caught:
        shard_attention(spec(), 5)
    assert caught.value.param == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="layer 3: 3 KV heads cannot be dealt to 8 ranks"):
        shard_attention(spec(num_kv_heads=3), 8)
    with pytest.raises(ConfigError, match="intermediate_size 40 cannot be cut for 3 ranks"):
        dense_cuts(DenseSpec(40), 0, 3)
