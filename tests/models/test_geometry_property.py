"""Random models whose layers all differ: every backend says what the formula of attention says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.harness import Bench, model_spec, random_model

from headrace.attention import select
from headrace.model_spec import AttentionSpec, ModelSpec, RopeSpec
from models.test_geometry import eager

GROUP_SIZES = [1, 2, 3, 5, 7, 9]


@st.composite
def layers(draw: st.DrawFn, index: int) -> AttentionSpec:
    kv_heads = draw(st.sampled_from([1, 2, 3, 6]))
    head_dim = draw(st.integers(1, 12))
    return AttentionSpec(
        layer=index,
        num_heads=kv_heads * draw(st.sampled_from(GROUP_SIZES)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.integers(1, 12)),
        scale=draw(st.sampled_from([0.2, head_dim**-0.5])),
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        rope=RopeSpec(draw(st.sampled_from([100.0, 10000.0]))),
        window=draw(st.sampled_from([None, None, 2, 6, 11])),
        soft_cap=draw(st.sampled_from([None, None, 2.5])),
        sinks=draw(st.booleans()),
        output_gate=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    count = draw(st.integers(1, 4))
    return model_spec([draw(layers(index)) for index in range(count)])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(models(), st.integers(0, 1000), st.integers(1, 9), st.sampled_from([1, 3, 4]))
def test_every_backend_is_the_formula(spec: ModelSpec, seed: int, chunk: int, block_size: int) -> None:
    model = random_model(spec, seed=seed)
    tokens = torch.randint(0, 61, (19,), generator=torch.Generator().manual_seed(seed)).tolist()
    expected = eager(model, tokens).float().log_softmax(-1)
    usable = [
        name
        for name in select.names()
        if name not in ("triton", "invariant")
        and not any(select.refusals(layer, "cpu", "float32")[name] for layer in spec.layers)
    ]
    assert "reference" in usable and "torch" in usable
    for name in usable:
        bench = Bench(model, name, block_size=block_size, seed=seed)
        sequence, other = bench.sequence(tokens), bench.sequence(tokens[:7])
        rows = [bench.step([(sequence, chunk)]), bench.step([(other, 7), (sequence, 13 - chunk)])[7:]]
        rows += [bench.step([(sequence, 1)], decodes=1) for _ in range(6)]
        torch.testing.assert_close(torch.cat(rows).log_softmax(-1), expected, atol=1e-4, rtol=0)
