"""What an adapter's directory may hold, what is refused by name, and what its digest depends on."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import ConfigError
from headrace.sources.adapter import read_adapter

STEM = "base_model.model.model.layers.0.self_attn"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for module in ("q_proj", "k_proj"):
        found[f"{STEM}.{module}.lora_A.weight"] = torch.randn(4, 16, generator=generator)
        found[f"{STEM}.{module}.lora_B.weight"] = torch.randn(8, 4, generator=generator)
    return found | more


def write(folder: Path, config: dict[str, Any] | None = None, stored: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(tensors() if stored is None else stored, folder / "adapter_model.safetensors")
    return folder


def digest(folder: Path, **changes: Any) -> str:
    kept = folder.parent / "kept"
    kept.mkdir(exist_ok=True)
    return read_adapter(write(folder, **changes), 8, kept).digest


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    first = digest(tmp_path / "first")
    assert len(first) == 32
    turned = dict(reversed(tensors().items()))
    same = digest(tmp_path / "same", stored=turned, config={"base_model_name_or_path": "x", "lora_dropout": 0.1})
    assert same == first, "neither order nor what does not change the product"
    assert digest(tmp_path / "rank", config={"rank_pattern": {"k_proj": 4}, "r": 4}) == first
    others = [
        digest(tmp_path / "alpha", config={"lora_alpha": 9}),
        digest(tmp_path / "pattern", config={"alpha_pattern": {"q_proj": 9}}),
        digest(tmp_path / "rslora", config={"use_rslora": True}),
        digest(tmp_path / "value", stored=tensors() | {f"{STEM}.q_proj.lora_A.weight": torch.zeros(4, 16)}),
        digest(tmp_path / "dtype", stored={name: tensor.half() for name, tensor in tensors().items()}),
    ]
    assert len({first, *others}) == 6
    assert sorted(file.stem for file in (tmp_path / "kept").iterdir()) == sorted({first, *others})


def test_a_safetensors_file_with_its_configuration_is_an_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"alpha_pattern": {"layers.0.self_attn.k_proj": 2}})
    files = read_adapter(folder / "adapter_model.safetensors", 8, tmp_path)
    assert [(matrix.module, matrix.scale) for matrix in files.matrices] == [
        ("model.layers.0.self_attn.k_proj", 0.5),
        ("model.layers.0.self_attn.q_proj", 2.0),
    ]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters must be a list"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters must be a list"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r is 0"),
        ({"r": 3}, "must have the rank 3"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"alpha_pattern": {"(": 1}}, "not a regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configuration_that_is_not_supported_names_the_field(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_adapter(write(tmp_path / "a", config), 8, tmp_path)
    assert named in refused.value.message and refused.value.param == "lora_path"
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("*.part")), "nothing is left of it"


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({}, "has no tensors"),
        (tensors(**{f"{STEM}.v_proj.lora_A.weight": torch.ones(4, 16)}), r"v_proj.lora_A.weight, and no .*v_proj.lora_B"),
        (tensors(**{f"{STEM}.q_proj.lora_magnitude_vector": torch.ones(4, 4)}), "lora_magnitude_vector: DoRA"),
        (tensors(**{"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}), "embeddings"),
        (tensors(**{"base_model.model.lm_head.weight": torch.ones(4, 4)}), "lm_head.weight: it is not a low-rank part"),
        (tensors(**{f"{STEM}.q_proj.lora_A.weight": torch.ones(4, 16, dtype=torch.int32)}), "q_proj.lora_A.weight is I32"),
        (tensors(**{f"{STEM}.q_proj.lora_A.weight": torch.ones(4)}), r"q_proj.lora_A.weight is F32 \[4\]"),
        (tensors(**{f"{STEM}.q_proj.lora_A.weight": torch.ones(5, 16)}), "must have the rank 4"),
    ],
    ids=["empty", "half", "dora", "embedding", "head", "integers", "vector", "rank"],
)
def test_a_tensor_that_is_not_supported_is_named(tmp_path: Path, stored: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_adapter(write(tmp_path / "a", stored=stored), 8, tmp_path)


def test_a_rank_above_the_limit_names_the_flag_and_the_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 4, and --max-lora-rank is 2: start with 4 or more"):
        read_adapter(write(tmp_path / "a"), 2, tmp_path)


def test_files_that_are_no_adapter_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1], b"", whole[:8], b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match="not a safetensors file"):
            read_adapter(folder, 8, tmp_path)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(ConfigError, match=r"adapter_model.bin is pickled"):
        read_adapter(folder, 8, tmp_path)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(ConfigError, match="neither a directory"):
        read_adapter(folder / "adapter_model.bin", 8, tmp_path)
    weights.write_bytes(whole)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_adapter(folder, 8, tmp_path)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        read_adapter(folder, 8, tmp_path)
    with pytest.raises(ConfigError, match="there is no file"):
        read_adapter(tmp_path / "b.safetensors", 8, tmp_path)
