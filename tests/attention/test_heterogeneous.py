"""Layers of different geometry beside each other: what one layer needs must not be what another gets.

What else can go wrong with them is tested where it would: projections and loaders in ``weights/test_projections.py``, shards
in ``parallel/test_shards.py``, whole models in ``models/test_geometry.py`` and ``models/families/test_families.py``, bytes in
``cache/test_arena.py``, and the workspace of the GPU's kernels in ``kernels/attention/test_triton.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from support.attention_cases import layer_spec, make_case
from transformers import LlamaConfig

from headrace.attention import select
from headrace.attention.backend import AttentionInputs
from headrace.config import EngineArgs
from headrace.models import registry
from headrace.models.size import weight_bytes
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles

HERE = [
    name
    for name, reasons in select.refusals(layer_spec(), "cpu", "float32").items()
    if not reasons and name not in ("triton", "invariant")
]
KV_HEADS = (8, 4, 24, 1, 3)
"""KV heads of 24 query heads: groups of 3, 6, 1, 24 and 8."""


@pytest.mark.parametrize("order", list(itertools.permutations(KV_HEADS))[::29], ids=str)
@pytest.mark.parametrize("name", HERE)
def test_one_backend_serves_layers_of_all_group_sizes(name: str, order: tuple[int, ...]) -> None:
    """Planned once, run layer after layer: whichever comes first, nothing is sized by its KV heads."""
    rows = [(1, 40), (1, 9), (12, 30), (5, 5)]
    specs = [
        layer_spec(num_heads=24, num_kv_heads=kv_heads, head_dim=8, v_head_dim=4 + index, scale=0.3)
        for index, kv_heads in enumerate(order)
    ]
    cases = [make_case(spec, rows, seed=index) for index, spec in enumerate(specs)]
    backend, oracle = select.create(name), select.create("reference")
    # One step: the rows, and so the tables, are the same for all layers.
    step = cases[0].step
    backend.plan(step)
    oracle.plan(step)
    for case in cases:
        cache = dataclasses.replace(case.cache, rows=torch.nan_to_num(case.cache.rows))
        inputs = AttentionInputs(case.q, cache)
        out = backend.run(inputs)
        assert out.shape == (len(case.q), 24 * cache.spec.v_head_dim)
        torch.testing.assert_close(out, oracle.run(inputs), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kv_heads", [[6, 2, 1], [2, 1, 3]])
def test_estimates_are_the_sum_over_layers(kv_heads: list[int], tmp_path: Path) -> None:
    """The memory that a plan accounts for, of weights and of the cache, is that of each layer by its own numbers."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=64,
    )
    config.num_key_value_heads_list, config.v_head_dim = kv_heads, 5
    files = ModelFiles(
        name="m",
        kind="safetensors",
        directory=tmp_path,
        weight_files=[],
        config=config,
        generation_config={"eos_token_id": []},
    )
    spec = registry.model_spec(config)
    facts = DeviceFacts(device="cpu", name="x", instructions=frozenset(), num_cores=2, available_memory=1 << 30)
    memory = 300_000
    resolved = resolve(EngineArgs(kv_cache_memory=memory, block_size=8, dtype="float32"), files, spec, facts)
    block = 8 * sum(heads * (8 + 5) for heads in kv_heads) * 4
    (count,) = resolved.cache.num_blocks
    assert resolved.cache.nbytes == count * block <= memory
    model = registry.build(spec, "float32", "cpu")
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(spec, "float32", "none", "cpu") == held
