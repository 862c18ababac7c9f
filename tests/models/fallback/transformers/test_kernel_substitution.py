"""Kernel substitution: parts are recognised by what they compute, and left alone where they compute anything else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import tiny_models
from support.models.architectures import quiet
from support.models.foreign import decisions, engine, model_of, tokens_of
from torch import nn

from headrace.kernels import gpu
from headrace.models.fallback.transformers import kernel_substitution
from headrace.models.fallback.transformers.fuse import fuse_linears
from headrace.models.fallback.transformers.kernel_substitution import Norm, substitute_mlp, substitute_norm

SUBSTITUTED = {
    "llama": "7 norms, 3 MLPs, 3 attentions, 3 layers' sums, 3 with the norm of the next",
    "qwen3": "13 norms, 3 MLPs, 3 attentions, 3 layers' sums, 3 with the norm of the next",
    "smollm3": "7 norms, 3 MLPs, 3 attentions, 3 layers' sums, 3 with the norm of the next",
    "granite": "7 norms, 3 MLPs, 3 attentions, 0 layers' sums, 0 with the norm of the next",
    "gemma2": "0 norms, 3 MLPs, 3 attentions, 0 layers' sums, 0 with the norm of the next",
    "olmo2": "13 norms, 3 MLPs, 0 attentions, 0 layers' sums, 0 with the norm of the next",
    "gpt_oss": "7 norms, 0 MLPs, 0 attentions, 0 layers' sums, 0 with the norm of the next",
    "cohere": "0 norms, 3 MLPs, 0 attentions, 0 layers' sums, 0 with the norm of the next",
}
"""Norms of Gemma add one to their weights; OLMo 2 norms all heads together; gpt-oss has sinks; Cohere turns neighbours; Granite
multiplies what a layer adds."""


@pytest.mark.parametrize("kind", SUBSTITUTED)
def test_what_is_substituted(kind: str, tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model(kind), tmp_path)
        llm = engine(tmp_path)
    assert decisions(llm)["our kernels for"][0] == SUBSTITUTED[kind]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are met by all tests that run on it")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_kernels_of_gpus_take_what_models_give(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: a batch axis, heads as an axis of their own, slices."""
    with quiet():
        tiny_models.save(tiny_models.model(kind), tmp_path)
        expected = tokens_of(engine(tmp_path), [5, 6, 7], 2)
        llm = engine(tmp_path)
        assert decisions(llm)["our kernels for"][0] == SUBSTITUTED[kind]
        # From here on: what an engine warms itself up with takes no kernel of a GPU.
        taken: list[torch.Size] = []
        monkeypatch.setattr(gpu, "takes", lambda x: taken.append(x.shape) is None)
        assert tokens_of(llm, [5, 6, 7], 2) == expected
        assert len(taken) >= 2 * 3 * 3, "of each layer of both steps, norms and MLP at the least"


def test_a_layers_last_sum_is_the_next_ones_norm_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("qwen3"), tmp_path)
        llm = engine(tmp_path)
    model = model_of(llm)
    alone: list[tuple[int, ...]] = []
    rms_norm = kernel_substitution.rms_norm
    width = model.spec.hidden_size

    def noted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[-1] == width:
            alone.append(tuple(x.shape))
        return rms_norm(x, weight, eps)

    monkeypatch.setattr(kernel_substitution, "rms_norm", noted)
    expected = tokens_of(llm, [5, 6, 7], 4)
    # Of a prompt and three tokens: the first layer's norm of the embeddings, and no other.
    assert len(alone) == 4
    for module in model.foreign.modules():
        if isinstance(ours := module.__dict__.get("forward"), kernel_substitution.PreNormLayer):
            ours.after = None
    assert tokens_of(llm, [5, 6, 7], 4) == expected
    assert len(alone) == 4 + 4 * 4


def test_layers_without_rotation_are_seen(tmp_path: Path) -> None:
    config = tiny_models.config("smollm3")
    config.no_rope_layers = [1, 0, 1]
    with quiet():
        made = transformers.SmolLM3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
        tiny_models.save(made, tmp_path)
        model = model_of(engine(tmp_path))
    turned = [module.forward._attention.spec.rotary_dim for module in model.calls.modules]
    assert turned == [8, 0, 8]


def test_a_clamp_that_ordinary_values_never_meet_is_seen(tmp_path: Path) -> None:
    config = tiny_models.config("olmo")
    config.clip_qkv = 8.0
    with quiet():
        made = transformers.OlmoForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in made.parameters():
            parameter.data.add_(0.15 * torch.randn_like(parameter))
        tiny_models.save(made, tmp_path)
        llm = engine(tmp_path)
    assert decisions(llm)["our kernels for"][0].endswith("0 attentions, 0 layers' sums, 0 with the norm of the next")
    assert len(tokens_of(llm, [4, 5, 6])) == 6


class Rms(nn.Module):
    def __init__(self, width: int, **changes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = 1e-5
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes.get("centred"):
            x = x - x.mean(-1, keepdim=True)
        eps = self.changes.get("eps", self.eps)
        weight = self.weight + self.changes.get("offset", 0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_norms() -> None:
    norm = Rms(16)
    assert substitute_norm(norm, torch.float32)
    assert isinstance(norm.forward, Norm)


@pytest.mark.parametrize("changes", [{"centred": True}, {"eps": 1e-4}, {"offset": 1.0}], ids=str)
def test_other_norms_are_left_alone(changes: dict[str, Any]) -> None:
    norm = Rms(16, **changes)
    assert not substitute_norm(norm, torch.float32)
    assert "forward" not in norm.__dict__


class Mlp(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=False)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "silu": (nn.functional.silu, True),
    "gelu by tanh": (tanh_gelu, True),
    "gelu": (nn.functional.gelu, False),
    "gelu by sigmoid": (quick_gelu, False),
    "relu": (nn.functional.relu, False),
    "sigmoid": (torch.sigmoid, False),
    "mish": (nn.functional.mish, False),
    "silu, clamped": (lambda x: nn.functional.silu(x.clamp(max=7.0)), False),
}


@pytest.mark.parametrize("size", [1e-2, 1.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("act", "ours"), ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_mlps_by_their_activation(act: Any, ours: bool, dtype: torch.dtype, size: float, seed: int) -> None:
    """However small the weights: near zero all activations look alike, and some are near each other everywhere."""
    torch.manual_seed(seed)
    mlp = Mlp(act).to(dtype)
    with torch.inference_mode():
        for parameter in mlp.parameters():
            parameter.mul_(size)
        assert fuse_linears(mlp, [("gate_proj", "up_proj")]) == 1
        x = torch.randn(1, 3, 16).to(dtype)
        expected = mlp(x)
        assert substitute_mlp(mlp, dtype) is ours
        assert ("forward" in mlp.__dict__) is ours
        near = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02 * size**3}
        torch.testing.assert_close(mlp(x), expected, **near)


def test_a_substituted_layer_still_waits_for_its_turn(tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("llama"), tmp_path)
        model = model_of(engine(tmp_path))
    second = model.calls.modules[1]
    with pytest.raises(ValueError, match="whose turn it is not"), model.calls.in_order():
        second(hidden_states=torch.zeros(1, 2, 32), position_embeddings=None)
