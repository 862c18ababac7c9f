"""The small layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from headrace.errors import ConfigError
from headrace.kernels.activation import ACTIVATIONS, silu_mul
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear, make_invariant
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import MoeMLP
from headrace.layers.norm import RMSNorm
from headrace.model_spec import DenseSpec, MoeSpec

PLACE = {"dtype": torch.float32, "device": "cpu"}


def fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.normal_()


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    layer = Linear(6, 10, bias=bias, **PLACE)
    fill(layer)
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
    assert {name for name, _ in layer.named_parameters()} == ({"weight", "bias"} if bias else {"weight"})
    assert layer.weight.shape == (10, 6) and not layer.weight.requires_grad
    assert layer(torch.empty(0, 6)).shape == (0, 10)


@pytest.mark.parametrize("bias", [True, False])
def test_an_exact_product_is_not_rounded(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of factors in 16 bits, slice by slice, and of the weight as it is now."""
    monkeypatch.setattr("headrace.kernels.linear.reference._SLICE", 3 * 40)
    layer = Linear(40, 10, bias=bias, dtype=torch.bfloat16, device="cpu")
    layer.out_dtype, layer.exact = torch.float32, True
    for _ in range(2):
        fill(layer)
        x = torch.randn(3, 40).bfloat16()
        expected = functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        assert layer(x).dtype == torch.float32
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
        layer.exact = False
        assert (layer(x) - expected).abs().max() > 1e-3
        layer.exact = True
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert not list(layer.buffers())


def test_norm_and_residual() -> None:
    norm = RMSNorm(12, 1e-3, **PLACE)
    fill(norm)
    x, residual = torch.randn(5, 12), torch.randn(5, 12)
    normed, total = norm.add(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (12,), norm.weight, 1e-3))
    torch.testing.assert_close(norm(x), functional.rms_norm(x, (12,), norm.weight, 1e-3))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_equals_transformers_activation(name: str) -> None:
    mlp = GatedMLP(8, DenseSpec(12, name, bias=True), **PLACE)
    fill(mlp)
    x = torch.randn(4, 8)
    gate, up = functional.linear(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias).chunk(2, dim=-1)
    expected = functional.linear(ACT2FN[name](gate) * up, mlp.down_proj.weight, mlp.down_proj.bias)
    torch.testing.assert_close(mlp(x), expected)


def test_a_gated_product_goes_straight_to_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = GatedMLP(8, DenseSpec(12, "silu"), **PLACE)
    fill(mlp)
    x = torch.randn(4, 8)
    expected, plain = mlp(x), mlp.gate_up_proj.forward
    monkeypatch.setattr(type(mlp.gate_up_proj.method), "apply_gated", lambda self, layer, x: silu_mul(plain(x)))
    monkeypatch.setattr(mlp.gate_up_proj, "forward", lambda x: pytest.fail("the product was computed alone"))
    torch.testing.assert_close(mlp(x), expected)


def test_embedding() -> None:
    table = Embedding(5, 3, **PLACE)
    fill(table)
    assert torch.equal(table(torch.tensor([4, 0, 4])), table.weight[[4, 0, 4]])


def test_products_are_made_invariant() -> None:
    mlp = GatedMLP(8, DenseSpec(12, "silu"), **PLACE)
    make_invariant(torch.nn.Sequential(Embedding(5, 8, **PLACE), RMSNorm(8, 1e-3, **PLACE), mlp))
    assert mlp.gate_up_proj.batch_invariant and mlp.down_proj.batch_invariant


def test_mixtures_are_made_invariant() -> None:
    mixture = MoeMLP(8, MoeSpec(num_experts=4, top_k=2, intermediate_size=6, shared=DenseSpec(12, "silu")), **PLACE)
    make_invariant(mixture)
    assert mixture.gate.batch_invariant and mixture.experts.batch_invariant
    assert mixture.shared_experts is not None and mixture.shared_experts.down_proj.batch_invariant


def test_a_module_with_products_of_its_own_cannot_be_made_invariant() -> None:
    with pytest.raises(ConfigError, match=r"deterministic: 1 \(Linear\)"):
        make_invariant(torch.nn.Sequential(Embedding(5, 8, **PLACE), torch.nn.Linear(8, 8)))
