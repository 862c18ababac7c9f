"""Checkpoints of mixtures and of compressed KV: as they are saved, read and given back, and what is told of broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.cases import CASES, SMALL, pair
from support.models.export import export
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, PreTrainedModel, Qwen3MoeConfig

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.model_spec import MoeSpec
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles
from headrace.weights.load import load_weights

NAMES = ["qwen3-moe-mixed", "ernie-biases", "ernie-moe", "ernie-moe-biases", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3"]


def files(folder: Path, theirs: PreTrainedModel) -> ModelFiles:
    return ModelFiles(
        name="tiny",
        kind="safetensors",
        directory=folder,
        weight_files=[folder / "model.safetensors"],
        config=theirs.config,
        generation_config={},
    )


def load(folder: Path, theirs: PreTrainedModel) -> Decoder:
    model = registry.build(registry.model_spec(theirs.config), "float32", "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    load_weights(model, registry.name_table(model.spec), files(folder, theirs))
    return model


def equal(one: Decoder, other: Decoder) -> None:
    parameters = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, parameters.pop(name)), name
    assert not parameters


@pytest.mark.parametrize("name", NAMES)
def test_as_transformers_saves_it(name: str, tmp_path: Path) -> None:
    """An expert's matrices apart."""
    theirs, ours = pair(name)
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if any(isinstance(mlp, MoeSpec) for mlp in ours.spec.mlps):
        assert any(".experts.0.up_proj.weight" in key for key in stored)
    equal(load(tmp_path, theirs), ours)


@pytest.mark.parametrize("name", ["qwen3-moe", "ernie-moe", "deepseek-v3"])
def test_as_transformers_holds_it(name: str, tmp_path: Path) -> None:
    """The experts stacked."""
    theirs, ours = pair(name)
    state = {key: value.contiguous() for key, value in theirs.state_dict().items() if key != "lm_head.weight"}
    if not theirs.config.tie_word_embeddings:
        state["lm_head.weight"] = theirs.lm_head.weight.data
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / "model.safetensors")
    equal(load(tmp_path, theirs), ours)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name)
    exported = {key: value.contiguous() for key, value in export(registry.name_table(ours.spec), ours)}
    theirs.config.save_pretrained(tmp_path)
    save_file(exported, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = theirs.state_dict()
    for key, value in again.state_dict().items():
        assert torch.equal(value, wanted.pop(key)), key
    assert not wanted


def test_what_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    theirs, ours = pair("deepseek-v3")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, path)
    equal(load(tmp_path, theirs), ours)


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("model.layers.1.mlp.experts.7.up_proj.weight", None, ["lacks"]),
        ("model.layers.2.mlp.gate.e_score_correction_bias", None, ["lacks"]),
        ("model.layers.1.mlp.experts.7.down_proj.weight", torch.zeros(48, 21), ["[48, 21]", "[48, 20]"]),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(39, 48), ["[39, 48]", "[40, 48]"]),
        ("model.layers.0.self_attn.kv_b_proj.weight", torch.zeros(64, 31), ["[64, 31]", "[64, 32]"]),
        ("model.layers.1.mlp.experts.12.up_proj.weight", torch.zeros(20, 48), ["no place for"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_tensor(tensor: str, change: torch.Tensor | None, words: list[str], tmp_path: Path) -> None:
    theirs, _ = pair("deepseek-v3")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if change is None:
        del weights[tensor]
    else:
        weights[tensor] = change
    save_file(weights, path)
    with pytest.raises(ConfigError) as error:
        load(tmp_path, theirs)
    assert all(word in str(error.value) for word in [tensor, *words])


@pytest.mark.parametrize(
    ("config", "parameter"),
    [
        (DeepseekV2Config(**SMALL | {"num_key_value_heads": 2, "num_experts_per_tok": 2}), "num_key_value_heads"),
        (DeepseekV2Config(**SMALL | {"num_key_value_heads": 6}), "num_experts_per_tok"),
        (DeepseekV2Config(**SMALL | {"num_key_value_heads": 6, "norm_topk_prob": True}), "norm_topk_prob"),
        (DeepseekV2Config(**SMALL | {"num_key_value_heads": 6, "topk_method": "best"}), "topk_method"),
        (DeepseekV3Config(**SMALL | {"num_key_value_heads": 6, "moe_layer_freq": 2}), "moe_layer_freq"),
        (DeepseekV3Config(**SMALL | {"num_key_value_heads": 6, "scoring_func": "softmax"}), "scoring_func"),
        (DeepseekV3Config(**SMALL | {"num_key_value_heads": 6, "n_group": 7}), "num_groups"),
        (DeepseekV3Config(**SMALL | {"num_key_value_heads": 6, "kv_lora_rank": 0}), "kv_lora_rank"),
        (Qwen3MoeConfig(**SMALL | {"num_experts_per_tok": 129}), "top_k"),
        (Qwen3MoeConfig(**SMALL | {"mlp_only_layers": [3]}), "mlp_only_layers"),
        (Qwen3MoeConfig(**SMALL | {"hidden_act": "relu"}), "hidden_act"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configs_that_are_refused(config: object, parameter: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.model_spec(config)
    assert error.value.param == parameter


def test_experts_are_not_packed() -> None:
    """Asked for, it is refused; else it is not done, and said."""
    theirs, _ = pair("qwen3-moe")
    spec = registry.model_spec(theirs.config)
    device = DeviceFacts(device="cpu", name="", instructions=frozenset({"avx512_bf16"}), num_cores=1, available_memory=1 << 30)
    found = files(Path(), theirs)
    with pytest.raises(ConfigError, match="experts") as error:
        resolve(EngineArgs(quantization="int8"), found, spec, device)
    assert error.value.param == "quantization"
    assert resolve(EngineArgs(), found, spec, device).quantization == "none"


def test_every_case_of_a_mixture_routes_somewhere_else() -> None:
    """A router that chose the same experts for all tokens would be no test of it."""
    for name in ("qwen3-moe", "ernie-moe", "deepseek-v2", "deepseek-v3"):
        assert name in CASES
        _, ours = pair(name)
        router = ours.layers[-1].mlp.gate
        experts, _ = router(torch.randn(200, 48, generator=torch.Generator().manual_seed(0)))
        used = experts.unique()
        assert len(used) > router.spec.num_experts // 2, name
