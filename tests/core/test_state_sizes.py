"""Memory of states at the sizes of published models, as docs/state-layers.md has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cache_config import cache_holding

from headrace.core.states import snapshot_period
from headrace.model_spec import AttentionSpec, ConvSpec, StateGroup, StateSpec
from headrace.model_spec.kv import cache_groups
from headrace.resolve.states import PENDING


@pytest.mark.parametrize(
    ("layers", "heads", "kv_layers", "kv_heads", "nbytes", "period"),
    [(24, 32, 8, 4, 51_511_296, 15_744), (48, 48, 16, 4, 153_944_064, 23_552), (36, 32, 12, 2, 77_266_944, 31_488)],
    ids=["Qwen 3.5 9B", "Qwen 3.5 27B", "Qwen3-Next 80B"],
)
def test_the_page_has_the_sizes_of_models(
    layers: int, heads: int, kv_layers: int, kv_heads: int, nbytes: int, period: int
) -> None:
    """Delta rules of 16 key heads, and attention with heads of 256, in bfloat16."""
    conv = ConvSpec(4, (("q", 2048), ("k", 2048), ("v", 128 * heads)), bias=False, activation="silu")
    specs = [StateSpec(index, "gdn", heads, 16, 128, 128, conv) for index in range(layers)]
    block, gpu = (StateGroup(tuple(spec.planes("bfloat16", "float32", lag) for spec in specs)) for lag in (0, PENDING))
    attention = [
        AttentionSpec(layer=layer, num_heads=24, num_kv_heads=kv_heads, head_dim=256, v_head_dim=256, scale=0.0625)
        for layer in range(kv_layers)
    ]
    groups = cache_groups(attention, "bfloat16")
    config = cache_holding(
        (1, 1), block_size=16, groups=groups, enable_prefix_caching=True, dtype="bfloat16", states=block, state_grid=64
    )
    (group,), found = groups, (block.block_bytes, snapshot_period(config))
    assert found == (nbytes, period)
    tokens = f"{nbytes // group.bytes_per_token:,} tokens | every {period:,} |"
    row = f"| {layers} of {layers + kv_layers} | {nbytes:,}"
    page = (Path(__file__).parents[2] / "docs" / "state-layers.md").read_text()
    (line,) = [line for line in page.splitlines() if row in line]
    assert line.endswith(f" | {gpu.block_bytes:,} | {group.bytes_per_token:,} | {tokens}")
