"""Models in FP8: kernels that round what they make, and matrices that round what they get, give the same bits."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from support.models import hybrids
from support.models.cases import VOCAB, pair, prompt
from support.models.harness import Bench, model_spec, random_model
from torch import nn

from headrace.kernels import gpu
from headrace.kernels.linear import fp8
from headrace.kernels.linear.fp8_reference import Fp8Rows
from headrace.kernels.linear.fp8_tilings import FEW_ROWS, FewTiling, WideTiling
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.layers.rounding import round_norms
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import AttentionSpec, DenseSpec, RopeSpec
from headrace.models.decoder import Decoder
from headrace.quant.fp8 import Fp8BlockMethod, Fp8Method

ROUNDED = [
    *(("llama-tied", 6), ("qwen3", 6), ("gemma3", 10), ("gemma4-experts", 10), ("mimo", 5), ("ernie-moe", 4)),
    *(("deepseek-v2", 4), ("deepseek-v2-lite", 1), ("olmo2", 0)),
]
"""Cases, and how many of a model's norms only matrices in FP8 read. Routers read floats, and some matrices do not fit."""
HYBRIDS = [
    *(("nemotron-h-experts", 2), ("granite-dense", 5), ("falcon-h1", 3), ("olmo-hybrid", 3), ("nemotron-h", 3)),
    *(("granite-moe", 1), ("qwen3.5", 5), ("qwen3-next", 1), ("bamba", 5), ("lfm2-moe", 5), ("kimi-linear", 1), ("minimax", 0)),
]
"""The same of hybrids. Norms that several modules read, or whose result a factor multiplies, give floats."""


def hold(model: nn.Module, kind: type[Fp8Method]) -> None:
    """Rounds the matrices of layers, where they fit."""
    for name, linear in model.named_modules():
        if not isinstance(linear, Linear) or name == "lm_head":
            continue
        if not kind.supports(linear.in_features, linear.out_features, "cpu"):
            method, weight = kind(), linear.weight.detach()
            method.allocate(linear, weight.dtype, "cpu")
            method.load(linear, [StoredMatrix("floats", lambda weight=weight: weight)])
            linear.method = method


def rounding(model: nn.Module) -> list[int]:
    return [norm.rounds for norm in model.modules() if isinstance(norm, RMSNorm) and norm.rounds is not None]


def blocks(act: str = "silu") -> Decoder:
    spec = AttentionSpec(
        layer=0, num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125, rotary_dim=64, rope=RopeSpec(10000.0)
    )
    return random_model(model_spec([spec], hidden_size=256, vocab_size=VOCAB, mlps=(DenseSpec(384, act),)), "bfloat16")


@pytest.mark.parametrize(
    ("name", "count"), [*ROUNDED, *HYBRIDS[:4], *(pytest.param(*one, marks=pytest.mark.slow) for one in HYBRIDS[4:])]
)
def test_families(name: str, count: int) -> None:
    model = copy.deepcopy((hybrids.pair if name in hybrids.CASES else pair)(name)[1])
    hold(model, Fp8Method)
    prompts = [prompt(length) for length in (1, 13)]
    tokens, logits = Bench(model).generate(prompts, 4)
    assert not rounding(model)
    round_norms(model)
    assert len(rounding(model)) == count
    found, others = Bench(model).generate(prompts, 4)
    assert found == tokens
    for got, expected in zip(others, logits, strict=True):
        assert expected.isfinite().all() and torch.equal(got, expected)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (Fp8BlockMethod, "silu"),
        *(
            pytest.param(kind, act, marks=pytest.mark.slow)
            for kind, act in (
                (Fp8Method, "silu"),
                (Fp8Method, "gelu"),
                (Fp8BlockMethod, "gelu"),
                (Fp8Method, "gelu_pytorch_tanh"),
                (Fp8BlockMethod, "gelu_pytorch_tanh"),
            )
        ),
    ],
)
def test_kernels(kind: type[Fp8Method], act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU, interpreted, of few rows and of many."""
    model = blocks(act)
    hold(model, kind)
    prompts = [prompt(20)[:length] for length in (3, 20)]
    expected = Bench(model).generate(prompts, 2)[1]
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    tilings = FewTiling(16, 4, 4), WideTiling(64, 32, 4, 3, 2)
    monkeypatch.setattr(fp8, "choose", lambda rows, weight, hopper: tilings[rows > FEW_ROWS])
    tokens, logits = Bench(model, "triton").generate(prompts, 2)
    round_norms(model)
    assert set(rounding(model)) == {128 if kind is Fp8BlockMethod else 256}
    found, others = Bench(model, "triton").generate(prompts, 2)
    assert found == tokens
    for got, unfused, reference in zip(others, logits, expected, strict=True):
        assert torch.equal(got, unfused)
        # Later tokens are another's successors where rounding makes another one the best.
        assert (got[0] - reference[0]).norm() < 0.2 * reference[0].norm()


def test_floats_stay_floats() -> None:
    model = blocks()
    round_norms(model)
    assert not rounding(model)


def test_readers_have_to_agree() -> None:
    model = blocks()
    hold(model, Fp8Method)
    layer = model.layers[0]
    round_norms(model)
    assert (layer.input_layernorm.rounds, layer.post_attention_layernorm.rounds) == (256, 256)
    assert isinstance(layer.input_layernorm(torch.randn(2, 256).bfloat16()), Fp8Rows)
    layer.self_attn.readers = lambda: (layer.self_attn.qkv_proj, Linear(256, 16, dtype=torch.bfloat16, device="cpu"))
    round_norms(model)
    assert (layer.input_layernorm.rounds, layer.post_attention_layernorm.rounds) == (None, 256)


def test_floats_refuse_rounded_rows() -> None:
    layer, other = (Linear(64, 32, dtype=torch.bfloat16, device="cpu") for _ in range(2))
    hold(layer, Fp8Method)
    norm = RMSNorm(64, 1e-6, dtype=torch.bfloat16, device="cpu")
    norm.weight.data.fill_(1)
    norm.rounds = layer.rounds
    rows = norm(torch.randn(3, 64).bfloat16())
    assert layer(rows).shape == (3, 32)
    with pytest.raises(TypeError, match="floats are not multiplied by rounded rows"):
        other(rows)
