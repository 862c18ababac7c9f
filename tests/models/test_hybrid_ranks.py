"""Hybrid models on tensor-parallel ranks: each kind of state layer is cut by heads or channels, never as one range."""

from __future__ import annotations

import pytest
import torch
from support.models.cases import prompt
from support.models.harness import Bench, copy_weights
from support.models.hybrids import CASES, pair
from support.thread_ranks import on_ranks

from headrace.errors import ConfigError
from headrace.model_spec import StateSpec
from headrace.models import registry
from headrace.models.cuts import checked_cuts, num_sums
from headrace.models.decoder import Decoder
from headrace.models.mamba_config import state_space_specs
from headrace.parallel.group import Group
from headrace.parallel.layout import ParallelSizes, describe, shard_model
from headrace.parallel.shards import shard_state
from models.test_tensor_parallel import parts, same_on_ranks

QUICK = ("qwen3-next-uneven", "olmo-hybrid", "nemotron-h-biases", "granite-dense")
"""Each way of storing a mixer's projections, three value heads a key head, and a norm that spans the ranks."""
HELD = ("qwen3-next-uneven", "falcon-h1-norm")
"""Three value heads a key head; and groups."""


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_two_ranks_say_what_one_says(name: str) -> None:
    theirs, whole = pair(name)
    same_on_ranks(whole, theirs.state_dict(), parts(whole.spec, 2), steps=3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("bamba-groups", "bamba", "lfm2")] + ["falcon-h1-norm"]
)
def test_four_ranks_share_groups_and_norms(name: str) -> None:
    """Two groups on four ranks: neighbours have the same B and C, and norm together, before the gate and behind it."""
    theirs, whole = pair(name)
    same_on_ranks(whole, theirs.state_dict(), parts(whole.spec, 4), steps=2)


def test_what_cannot_be_dealt_out_is_refused_by_name() -> None:
    _, uneven = pair("qwen3-next-uneven")
    with pytest.raises(
        ConfigError, match=r"state layer 0: 6 value heads cannot be dealt to 4 ranks; sizes that work: 1, 2$"
    ) as caught:
        shard_model(uneven.spec, 0, ParallelSizes(4))
    assert caught.value.param == "tensor_parallel_size"
    short, grouped = (
        pair("lfm2")[1].spec.states[0],
        state_space_specs(1, heads=12, width=8, groups=4, size=8, taps=4, bias=True, dt_limit=(0.0, 1.0))[0],
    )
    for spec, size, message in ((short, 3, "64 channels"), (grouped, 6, "4 groups")):
        with pytest.raises(ConfigError, match=f"state layer 0: {message} cannot be dealt to {size} ranks"):
            shard_state(spec, size)


def test_a_rank_holds_its_part_of_each_projection() -> None:
    _, whole = pair("qwen3.5")
    (_, spec) = parts(whole.spec, 2)
    assert spec.shard is not None
    part = registry.build(spec, "float32", "meta")
    cuts = checked_cuts(whole, part, spec.shard)
    # q, k and v of 2 key heads of 16 channels, each twice as many values.
    assert cuts["layers.0.linear_attn.conv1d.weight"].ranges == ((16, 32), (48, 64), (96, 128))
    assert cuts["layers.0.linear_attn.in_proj.weight"].ranges == ((16, 32), (48, 64), (96, 128), (160, 192))
    assert cuts["layers.0.linear_attn.A_log"].ranges == ((2, 4),)
    assert num_sums(part) == 2 * 4
    lines = {name: (value, reason) for name, value, reason in describe(spec)}
    assert lines["heads of a rank's states"] == ("2 of 4", "1 of 2 key heads or groups, each on one rank")


@pytest.mark.parametrize("name", [name if name in HELD else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_states_of_ranks_are_parts_of_the_whole(name: str) -> None:
    """Each part of a convolution is cut by itself, and recurrences by heads: so is what a snapshot holds."""
    theirs, whole = pair(name)
    specs = parts(whole.spec, 2)

    def states(model: Decoder) -> list[list[torch.Tensor]]:
        bench = Bench(model)
        sequence = bench.sequence(prompt(37))
        bench.prefill(sequence, 20)
        assert bench.states is not None
        planes = [[plane for plane in (layer.conv, layer.state) if plane is not None] for layer in bench.states]
        return [[plane[sequence.state].clone() for plane in layer] for layer in planes]

    def run(group: Group) -> list[list[torch.Tensor]]:
        model = registry.build(specs[group.rank], "float32", "cpu", group)
        copy_weights(model, theirs.state_dict())
        return states(model)

    found, expected = on_ranks(2, run), states(whole)
    for rank, (spec, layers) in enumerate(zip(specs, found, strict=True)):
        for of_whole, of_part, planes, held in zip(whole.spec.states, spec.states, expected, layers, strict=True):
            mine, conv = [], planes[0]
            for (_, width), (_, own) in zip(_parts(of_whole), _parts(of_part), strict=True):
                channels, conv = conv.split((width, conv.shape[1] - width), dim=1)
                # Channels of a group that both ranks need are on both.
                mine.append(channels if own == width else channels[:, rank * own : (rank + 1) * own])
            if mine:
                torch.testing.assert_close(held[0], torch.cat(mine, dim=1), atol=1e-4, rtol=1e-4)
            for theirs_plane, own_plane in zip(planes[bool(mine) :], held[bool(mine) :], strict=True):
                wanted = theirs_plane[rank * of_part.heads : (rank + 1) * of_part.heads]
                torch.testing.assert_close(own_plane, wanted, atol=1e-4, rtol=1e-4)


def _parts(spec: StateSpec) -> tuple[tuple[str, int], ...]:
    return () if spec.conv is None else spec.conv.parts
