"""Experts of mixtures in GGUF are held as the file has them, whole and cut for ranks, and say what their floats say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.quant_blocks import HALVES, Type, random_blocks
from transformers import Qwen3MoeConfig

from headrace.kernels import native
from headrace.layers.moe import Experts
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.size import weight_bytes
from headrace.parallel.layout import ParallelSizes, shard_model
from headrace.quant.experts import CodedExperts
from headrace.quant.native import with_vectors
from headrace.quant.registry import QUANTIZATIONS, STORED, find
from headrace.weights.load import load_weights
from headrace.weights.report import LoadReport

from .experts import same_answers, same_experts
from .models import config, files, tensors, write_gguf

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [],
    "num_hidden_layers": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HELD = {
    "Q4_0": "int4, groups of 32",
    "Q4_1": "int4, groups of 32 with minima",
    "Q5_0": "int8, groups of 32",
    "Q5_1": "int8, groups of 32 with minima",
    "Q8_0": "int8, groups of 32",
    "Q2_K": "int4, groups of 16 with minima",
    "Q3_K": "int4, groups of 16",
    "Q4_K": "int4, groups of 32 with minima",
    "Q5_K": "int8, groups of 32 with minima",
    "Q6_K": "int8, groups of 16",
    "IQ4_NL": "int8, groups of 32",
    "IQ4_XS": "int8, groups of 32",
    "MXFP4": "MXFP4, groups of 32",
}

MINIMA = 2.0**-20
"""Relative rounding, in float32, of numbers with minima."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has kernels of its own for what is stored."""
    monkeypatch.setitem(QUANTIZATIONS["cpu"], STORED, find(STORED, "cuda"))


def saved(folder: Path, kinds: tuple[Type, ...], **changes: Any) -> tuple[Qwen3MoeConfig, Path]:
    """``kinds``: of gate, up and down."""
    hf_config = config(Qwen3MoeConfig, **MIXTURE | changes)

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if ".experts." not in name:
            return rows, Type.F32
        kind = kinds[("gate_proj", "up_proj", "down_proj").index(name.split(".")[-2])]
        return random_blocks(kind, *rows.shape, seed=len(name) + int(name.split(".")[5])), kind

    return hf_config, write_gguf(folder / "m.gguf", "qwen3moe", tensors(hf_config), encode)


def loaded(hf_config: Qwen3MoeConfig, path: Path, quantization: str, rank: int = 0, **sizes: Any) -> tuple[Decoder, LoadReport]:
    spec = registry.model_spec(hf_config)
    spec = shard_model(spec, rank, ParallelSizes(**sizes)) if sizes else spec
    model = registry.build(spec, "float32", "cpu", to_load=True)
    found = files(hf_config, "gguf", [path])
    device = torch.device("cpu")
    return model, load_weights(model, registry.name_table(spec), found, device=device, quantization=quantization)


@pytest.mark.parametrize("name", HELD)
def test_blocks_are_kept(name: str, tmp_path: Path) -> None:
    hf_config, path = saved(tmp_path, (Type[name],) * 3)
    (held, report), (floats, _) = (loaded(hf_config, path, how) for how in (STORED, "none"))
    same_experts(held, floats, CodedExperts, MINIMA)
    if name in ("Q4_K", "Q6_K", "IQ4_XS"):
        same_answers(held, floats, 1e-5)
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    assert decision.value == HELD[name]
    assert f"stored as {name}, whose numbers are kept" in decision.reason and "no rounding of weights" in decision.reason
    (line,) = [one for one in report.memory if one.name == "packed weights"]
    experts = [one for one in held.modules() if isinstance(one, Experts)]
    assert line.detail == HELD[name] and line.nbytes == sum(one.nbytes for each in experts for one in each.buffers())
    bits = (4 if "int8" not in HELD[name] else 8) + {"Q2_K": 4, "MXFP4": 0.25}.get(name, 2)
    assert line.nbytes <= bits / 8 * 4 * 3 * 256 * 256


def test_every_type_is_tested() -> None:
    assert HELD.keys() == {kind.name for kind in HALVES}


@pytest.mark.parametrize(
    ("kinds", "value"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), "int4, groups of 32 with minima and int8, groups of 16"),
        (("Q4_K", "Q6_K", "Q8_0"), "int8, groups of 16 with minima and int8, groups of 32"),
        (("Q3_K", "Q4_0", "MXFP4"), "int4, groups of 16 and MXFP4, groups of 32"),
    ],
    ids=str,
)
def test_matrices_of_several_types_have_one_format(kinds: tuple[str, ...], value: str, tmp_path: Path) -> None:
    """Matrices of an expert have several types, as in files of the M kind; gate and up, which are one matrix, are held in a
    format that holds both."""
    hf_config, path = saved(tmp_path, tuple(Type[kind] for kind in kinds))
    (held, report), (floats, _) = (loaded(hf_config, path, how) for how in (STORED, "none"))
    same_experts(held, floats, CodedExperts, MINIMA)
    assert any(one.value == value for one in report.decisions)


@pytest.mark.parametrize("kinds", [("Q4_K", "MXFP4", "Q8_0"), ("Q4_K", "F32", "Q8_0")], ids=str)
def test_what_no_format_holds_becomes_floats_with_a_reason(kinds: tuple[str, ...], tmp_path: Path) -> None:
    hf_config = config(Qwen3MoeConfig, **MIXTURE)

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if ".experts." not in name:
            return rows, Type.F32
        kind = Type[kinds[("gate_proj", "up_proj", "down_proj").index(name.split(".")[-2])]]
        return (rows if kind == Type.F32 else random_blocks(kind, *rows.shape)), kind

    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors(hf_config), encode)
    held, report = loaded(hf_config, path, STORED)
    assert not any(isinstance(one.method, CodedExperts) for one in held.modules() if isinstance(one, Experts))
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    mixed = "have different number formats" if "MXFP4" in kinds else "not all experts are stored as codes"
    assert decision.value == "floats" and "dequantised" in decision.reason and mixed in decision.reason


@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole experts"])
def test_ranks_hold_parts_of_codes(whole: bool, tmp_path: Path) -> None:
    """Slices of 128 channels lie within super-blocks of 256."""
    hf_config, path = saved(tmp_path, (Type.Q4_K, Type.Q4_K, Type.Q6_K))
    for rank in range(2):
        (held, _), (floats, _) = (loaded(hf_config, path, how, rank, tensor=2, whole_experts=whole) for how in (STORED, "none"))
        same_experts(held, floats, CodedExperts, MINIMA)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_processors_keep_symmetric_integers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts are to be integers; those with minima are rounded again."""
    monkeypatch.undo()
    if with_vectors(native.load()) is None:
        pytest.skip("no compiler builds the kernels here")
    hf_config, path = saved(tmp_path, (Type[name],) * 3)
    held, report = loaded(hf_config, path, "int8")
    (decision,) = [one for one in report.decisions if one.name.startswith("format of layers.*.mlp.experts")]
    assert ("whose numbers are kept" in decision.reason) == (name == "Q8_0")
    floats, _ = loaded(hf_config, path, "none")
    for module, theirs in floats.named_modules():
        if isinstance(theirs, Experts):
            ours = held.get_submodule(module)
            assert isinstance(ours, Experts)
            exact = theirs.get_parameter("down_proj")
            error = float((ours.method.dequantize(ours, "down_proj") - exact).norm() / exact.norm())
            assert error == 0 if name == "Q8_0" else 0 < error < 0.01


def test_dense_matrices_are_kept_too(tmp_path: Path) -> None:
    """Beside the experts, as on a GPU; v of another type than q and k."""
    hf_config = config(Qwen3MoeConfig, **MIXTURE)

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if "_proj" not in name:
            return rows, Type.F32
        kind = Type.Q6_K if "v_proj" in name else Type.MXFP4 if "o_proj" in name else Type.Q4_K
        return random_blocks(kind, *rows.shape, seed=len(name)), kind

    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors(hf_config), encode)
    spec = registry.model_spec(hf_config)
    reports = {}
    for how in (STORED, "none"):
        model = registry.build(spec, "bfloat16", "cpu", to_load=True)
        found = files(hf_config, "gguf", [path])
        report = load_weights(model, registry.name_table(spec), found, device=torch.device("cpu"), quantization=how)
        reports[how] = model, report
    (held, report), (floats, _) = reports[STORED], reports["none"]
    assert report.nbytes <= weight_bytes(spec, "bfloat16", STORED, "cpu")
    values = {one.name.split(".")[-1].split()[0]: one.value for one in report.decisions if "self_attn" in one.name}
    assert values == {"qkv_proj": "int8 in groups", "o_proj": "int8 in groups"}
    for name in ("layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_proj"):
        ours, theirs = held.get_submodule(name), floats.get_submodule(name)
        exact = ours.method.dequantize(ours)
        assert torch.equal(exact.bfloat16(), theirs.weight)
        x = torch.randn(3, exact.shape[1]).bfloat16()
        torch.testing.assert_close(ours(x).float(), x.float() @ exact.t(), rtol=2.0**-7, atol=1e-2)
