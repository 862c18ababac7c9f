"""Hybrid models on tensor-parallel ranks: each kind of state layer is cut by heads or channels, never as one range."""

from __future__ import annotations

import pytest
from support.models.hybrids import CASES, pair

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.cuts import checked_cuts, num_sums
from headrace.models.mamba_config import state_space_specs
from headrace.parallel.layout import ParallelSizes, describe, shard_model
from headrace.parallel.shards import shard_state
from models.test_tensor_parallel import parts, same_on_ranks

QUICK = ("qwen3-next-uneven", "olmo-hybrid", "nemotron-h-biases", "granite-dense")
"""Each way of storing a mixer's projections, three value heads a key head, and a norm that spans the ranks."""


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
