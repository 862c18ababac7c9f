"""Every layer by its own numbers: nothing may read a global head count or take V to be as wide as K."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.models.export import export
from support.models.harness import Bench, model_spec, random_model
from torch.nn import functional

from headrace.attention import select
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec, RopeSpec
from headrace.models.decoder import Decoder
from headrace.models.registry import name_table


def layer(index: int, **changes: object) -> AttentionSpec:
    values: dict = {"layer": index, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "rotary_dim": 8}
    values |= {"rope": RopeSpec(10000.0)} | changes
    return AttentionSpec(scale=values["head_dim"] ** -0.5, **values)


def usable() -> list[str]:
    """The backends that can run here (the native one needs a compiler)."""
    return [name for name, reasons in select.refusals(layer(0), "cpu", "float32").items() if not reasons]


GEOMETRIES: dict[str, ModelSpec] = {
    "kv-heads": model_spec([layer(0, num_kv_heads=2), layer(1, num_kv_heads=1), layer(2, num_kv_heads=3)]),
    "narrow-v": model_spec([layer(0, v_head_dim=4), layer(1, num_kv_heads=6, v_head_dim=5)]),
    "wide-v": model_spec(
        [layer(0, v_head_dim=20), layer(1)], attention_bias=True, output_bias=True, mlps=(DenseSpec(40, bias=True),) * 2
    ),
    "all-apart": model_spec(
        [
            layer(0, num_kv_heads=2, v_head_dim=12),
            layer(1, num_heads=3, num_kv_heads=1, head_dim=10, rotary_dim=10, window=6),
            layer(2, num_heads=9, num_kv_heads=3, head_dim=6, v_head_dim=3, rotary_dim=4),
            layer(3, num_heads=5, num_kv_heads=5, rotary_dim=0, window=11),
        ],
        qk_norm=True,
    ),
    "shared-kv": model_spec(
        [layer(0), layer(1, num_heads=4, kv_source=0), layer(2, v_head_dim=3), layer(3, v_head_dim=3, kv_source=2, window=5)],
        qk_norm=True,
        attention_bias=True,
    ),
    "gated": model_spec(
        [
            layer(0, v_head_dim=4, output_gate=True),
            layer(1, num_kv_heads=3, v_head_dim=12, output_gate=True, window=6),
            layer(2, num_kv_heads=3, v_head_dim=12, output_gate=True, kv_source=1, window=6),
        ],
        attention_bias=True,
    ),
    "v-from-k": model_spec(
        [
            layer(0, v_from_k=True),
            layer(1, v_from_k=True, output_gate=True, num_kv_heads=3),
            layer(2, v_from_k=True, kv_source=1, num_kv_heads=3),
        ],
        qk_norm=True,
    ),
    "partial-rotary": model_spec(
        [layer(0, rotary_dim=4), layer(1, rotary_dim=6, rope=RopeSpec(500.0)), layer(2, rotary_dim=2)]
    ),
    "caps-and-sinks": model_spec([layer(0, soft_cap=1.5), layer(1, sinks=True, window=9), layer(2, sinks=True, soft_cap=3.0)]),
}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def turn(x: torch.Tensor, width: int, theta: float) -> torch.Tensor:
    """Rotates ``[T, heads, d]`` at positions 0, 1 ... by complex multiplication."""
    if not width:
        return x
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., width:]), dim=-1)


def eager(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The whole model on one sequence, densely, in float64, by the checkpoint's separate tensors."""
    spec = model.spec
    weights = {name: tensor.double() for name, tensor in export(name_table(spec), model)}
    x = weights["model.embed_tokens.weight"][tokens]
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in spec.layers:
        here = f"model.layers.{one.layer}."

        def project(x: torch.Tensor, name: str, here: str = here) -> torch.Tensor:
            return functional.linear(x, weights[f"{here}{name}.weight"], weights.get(f"{here}{name}.bias"))

        y = norm(x, weights[here + "input_layernorm.weight"], spec.norm_eps)
        q = project(y, "self_attn.q_proj").view(len(x), one.num_heads, one.head_dim)
        if spec.qk_norm:
            q = norm(q, weights[here + "self_attn.q_norm.weight"], spec.norm_eps)
        theta = 1.0 if one.rope is None else one.rope.theta
        q = turn(q, one.rotary_dim, theta)
        if one.kv_source is None:
            k = keys = project(y, "self_attn.k_proj").view(len(x), one.num_kv_heads, one.head_dim)
            if spec.qk_norm:
                k = norm(k, weights[here + "self_attn.k_norm.weight"], spec.norm_eps)
            v = keys
            if not one.v_from_k:
                v = project(y, "self_attn.v_proj").view(len(x), one.num_kv_heads, one.v_head_dim)
            kept[one.layer] = turn(k, one.rotary_dim, theta), v
        k, v = (
            part.repeat_interleave(one.group_size, 1) for part in kept[one.layer if one.kv_source is None else one.kv_source]
        )
        logits = torch.einsum("qhd,khd->hqk", q, k) * one.scale
        if one.soft_cap:
            logits = one.soft_cap * (logits / one.soft_cap).tanh()
        place = torch.arange(len(x))
        seen = place[:, None] - place[None] < (one.window or len(x) + 1)
        mass = logits.exp() * (seen & (place[None] <= place[:, None]))
        total = mass.sum(-1, keepdim=True)
        if one.sinks:
            total = total + weights[here + "self_attn.sinks"].exp()[:, None, None]
        mixed = torch.einsum("hqk,khd->qhd", mass / total, v).flatten(1)
        if one.output_gate:
            mixed = mixed * torch.sigmoid(project(y, "self_attn.gate_proj"))
        x = x + project(mixed, "self_attn.o_proj")
        y = norm(x, weights[here + "post_attention_layernorm.weight"], spec.norm_eps)
        x = x + project(functional.silu(project(y, "mlp.gate_proj")) * project(y, "mlp.up_proj"), "mlp.down_proj")
    return functional.linear(norm(x, weights["model.norm.weight"], spec.norm_eps), weights["lm_head.weight"])


QUICK = [("all-apart", "invariant"), ("all-apart", "triton"), ("shared-kv", "triton")]
"""Cases that run without ``slow``: the interpreter takes seconds; "all-apart" has most of what the others have."""
SLOW = [(name, backend) for name in GEOMETRIES for backend in ("invariant", "triton") if (name, backend) not in QUICK]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[pytest.mark.slow] if (name, backend) in SLOW else [])
        for name in GEOMETRIES
        for backend in usable()
    ],
)
def test_layers_of_their_own_geometry(name: str, backend: str) -> None:
    model = random_model(GEOMETRIES[name])
    tokens = torch.randint(0, 61, (25,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = eager(model, tokens).float().log_softmax(-1)
    bench = Bench(model, backend, block_size=3)
    sequence, other = bench.sequence(tokens), bench.sequence(tokens[:5])
    rows = [bench.step([(sequence, 10)]), bench.step([(other, 5), (sequence, 12)])[5:]]
    rows += [bench.step([(sequence, 1)]) for _ in range(3)]
    torch.testing.assert_close(torch.cat(rows).log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_parameters_are_as_wide_as_the_layer_says() -> None:
    model = random_model(GEOMETRIES["all-apart"])
    for one, module in zip(model.spec.layers, model.layers, strict=True):
        attention = module.self_attn
        assert attention.qkv_proj.out_features == one.q_size + one.k_size + one.v_size
        assert attention.o_proj.in_features == one.num_heads * one.v_head_dim
        assert len(attention.q_norm.weight) == one.head_dim


def test_the_table_names_every_parameter_once() -> None:
    for spec in GEOMETRIES.values():
        model = random_model(spec)
        table = name_table(spec)
        assert sorted(table.parameters()) == sorted(name for name, _ in model.named_parameters())
        for parameter in table.parameters():
            rows = sum(
                part.view(model.get_parameter(parameter)).shape[0] for _, part in table.items() if part.parameter == parameter
            )
            assert rows == model.get_parameter(parameter).shape[0]


def test_tied_embeddings_share_the_parameter() -> None:
    model = random_model(model_spec([layer(0)], tie_word_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert name_table(model.spec).tied("lm_head.weight") == "embed_tokens.weight"


def test_padding_rows_leave_the_cache_alone() -> None:
    model = random_model(GEOMETRIES["kv-heads"])
    bench = Bench(model)
    sequence = bench.sequence([1, 2, 3, 4, 5, 6])
    bench.step([(sequence, 5)])
    before = [cache.rows.clone() for cache in bench.caches]
    bench.step([(sequence, 1)], padding=3)
    for cache, rows in zip(bench.caches, before, strict=True):
        changed = (cache.rows != rows).flatten(2).any(-1).nonzero().tolist()
        block = sequence.tables[cache.group][1]
        assert changed == [[block, 1]]


def test_missing_arguments_of_attention_are_named() -> None:
    model = random_model(GEOMETRIES["kv-heads"])
    attention = model.layers[0].self_attn.attention
    q, k = torch.randn(1, 6, 8), torch.randn(1, 2, 8)
    step = SimpleNamespace(slot_mapping=(torch.tensor([4]),))
    ctx = SimpleNamespace(step=step, caches=Bench(model).caches)
    with pytest.raises(ValueError, match=r"layer 0 .*cos_sin is missing"):
        attention(q, k, k, ctx)
    with pytest.raises(ValueError, match=r"layer 0 .*k or v is missing"):
        attention(q, None, k, ctx, torch.zeros(1, 8))
