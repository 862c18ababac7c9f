"""The mixture of experts is what transformers computes, whatever the family's way of routing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Ernie4_5_MoeConfig, GptOssConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from headrace.errors import ConfigError
from headrace.kernels.moe import route
from headrace.layers.moe import MoeMLP
from headrace.model_spec import CLAMPED_SWIGLU, DenseSpec, MoeSpec

HIDDEN, INNER, EXPERTS = 24, 20, 12
SIZES = {"num_experts": EXPERTS, "top_k": 3, "intermediate_size": INNER}
DEEPSEEK = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_attention_heads": 2,
}
CASES: dict[str, tuple[type[nn.Module], PretrainedConfig, MoeSpec]] = {
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=True
        ),
        MoeSpec(**SIZES),
    ),
    "qwen3-gelu": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=3, hidden_act="gelu"
        ),
        MoeSpec(**SIZES, normalize=False, act="gelu"),
    ),
    "ernie": (
        Ernie4_5_MoeSparseMoeBlock,
        Ernie4_5_MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, moe_num_experts=EXPERTS, moe_k=3, moe_num_shared_experts=2
        ),
        MoeSpec(**SIZES, shared=DenseSpec(2 * INNER), correction_bias=True, least_sum=1e-12),
    ),
    "deepseek-v2": (
        DeepseekV2Moe,
        DeepseekV2Config(**DEEPSEEK),
        MoeSpec(**SIZES, shared=DenseSpec(2 * INNER), normalize=False, routed_scale=1.7),
    ),
    "deepseek-v2-groups": (
        DeepseekV2Moe,
        DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        MoeSpec(**SIZES, shared=DenseSpec(2 * INNER), normalize=False, routed_scale=1.7, num_groups=4, top_groups=2),
    ),
    "deepseek-v3": (
        DeepseekV3MoE,
        DeepseekV3Config(**DEEPSEEK, n_group=3, topk_group=2, norm_topk_prob=True),
        MoeSpec(
            **SIZES,
            shared=DenseSpec(2 * INNER),
            routed_scale=1.7,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=3,
            top_groups=2,
            group_score="top2",
        ),
    ),
    "gpt-oss": (
        GptOssMLP,
        GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=3),
        MoeSpec(**SIZES, act=CLAMPED_SWIGLU, bias=True, router_bias=True, limit=7.0),
    ),
}


def pair(name: str) -> tuple[nn.Module, MoeMLP]:
    """The same layer twice. Weights are large enough for scores to differ and for clamps to bite."""
    module, config, spec = CASES[name]
    config._experts_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    theirs = module(config).eval()
    for tensor in [*theirs.parameters(), *theirs.buffers()]:
        tensor.data = torch.randn_like(tensor) * 0.6
    ours = MoeMLP(HIDDEN, spec, dtype=torch.float32, device="cpu")
    copy(ours, theirs)
    return theirs, ours


def copy(ours: MoeMLP, theirs: nn.Module) -> None:
    state = {name.replace("router.", "gate.").replace("moe_statics.", ""): value for name, value in theirs.state_dict().items()}
    for name, target in ours.named_parameters():
        if name.endswith("shared_experts.gate_up_proj.weight"):
            parts = [state.pop(name.replace("gate_up", part)) for part in ("gate", "up")]
            target.data.copy_(torch.cat(parts))
            continue
        value = state.pop(name).squeeze()
        if isinstance(theirs, GptOssMLP) and "experts" in name:
            value = value if name.endswith("bias") else value.transpose(1, 2)
            if "gate_up" in name:
                value = torch.cat((value[:, 0::2], value[:, 1::2]), dim=1)
        target.data.copy_(value)
    assert not state, list(state)


def theirs_of(theirs: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = theirs(x.unsqueeze(0))
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tokens: int) -> None:
    theirs, ours = pair(name)
    x = 2 * torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(ours(x), theirs_of(theirs, x), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_token_does_not_depend_on_the_others(name: str) -> None:
    _, ours = pair(name)
    x = torch.randn(9, HIDDEN)
    torch.testing.assert_close(torch.cat([ours(part) for part in x.split(1)]), ours(x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_bfloat16_routes_in_float32(name: str) -> None:
    """Weights round; the choice of experts does not."""
    _, exact = pair(name)
    half = MoeMLP(HIDDEN, CASES[name][2], dtype=torch.bfloat16, device="cpu")
    for mine, other in zip(half.parameters(), exact.parameters(), strict=True):
        mine.data.copy_(other)
    assert {p.dtype for p in half.gate.parameters()} == {torch.float32}
    x = torch.randn(30, HIDDEN).bfloat16()
    assert torch.equal(half.gate(x)[0], exact.gate(x.float())[0])
    got = half(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact(x.float()), atol=0.3, rtol=0.1)


def test_no_tokens() -> None:
    _, ours = pair("deepseek-v3")
    assert ours(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_a_broken_token_breaks_no_other() -> None:
    _, ours = pair("deepseek-v3")
    x = torch.randn(5, HIDDEN)
    expected = ours(x)
    x[2] = torch.nan
    got = ours(x)
    assert got[2].isnan().all()
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(got[kept], expected[kept], atol=1e-5, rtol=1e-5)


def test_the_correction_changes_the_choice_and_not_the_weights() -> None:
    spec = MoeSpec(num_experts=4, top_k=2, intermediate_size=1, correction_bias=True, normalize=False)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    experts, weights = route(logits, spec, torch.tensor([-9.0, 0.0, 0.0, 9.0]))
    shares = logits.softmax(-1)[0]
    assert set(experts[0].tolist()) == {1, 3}
    torch.testing.assert_close(weights[0], shares[experts[0].long()])


def test_experts_of_left_out_groups_are_never_chosen() -> None:
    spec = MoeSpec(num_experts=6, top_k=2, intermediate_size=1, num_groups=3, top_groups=1, group_score="top2")
    # The best single expert is in a group whose best two are not the best.
    experts, _ = route(torch.tensor([[0.0, 5.0, 4.3, 4.5, -9.0, 0.0]]), spec)
    assert set(experts[0].tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"top_k": 13}, "top_k"),
        ({"num_groups": 5}, "num_groups"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 4}, "top_k"),
        ({"num_groups": 12, "top_groups": 4, "group_score": "top2"}, "num_groups"),
    ],
)
def test_specs_that_make_no_sense(changes: dict, parameter: str) -> None:
    with pytest.raises(ConfigError) as error:
        MoeSpec(**{**SIZES, **changes})
    assert error.value.param == parameter
