"""Quantised checkpoints of hybrids, and of models with indexers, as their publishers write them: whole, and on two ranks, they
say what their floats say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models import cases, hybrids, indexed
from support.models.cases import greedy, prompt
from support.models.harness import Bench
from support.thread_ranks import on_ranks
from transformers import PreTrainedModel

from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.parallel.group import Group
from headrace.parallel.layout import ParallelSizes, shard_model
from headrace.quant.float_codes import TileCodes
from headrace.quant.groups import relative_error
from headrace.sources.files import ModelFiles
from headrace.weights.load import load_weights

Tensors = dict[str, torch.Tensor]


def grouped(kind: str, strategy: str, form: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS = {
    "blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]},
    "outputs": grouped("float", "channel", "float-quantized"),
    "matrix": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "int8": grouped("int", "channel", "int-quantized"),
}
"""``quantization_config``, by what shares a scale, or the codes."""
SEVERAL = ("nemotron-h-experts", "granite-moe", "falcon-h1", "olmo-hybrid-even", "qwen3.5-moe")
QUICK = (("qwen3-next", "blocks"), ("nemotron-h-experts", "matrix"), ("granite-moe", "outputs"))
PAIRS = [
    *QUICK,
    *(
        pytest.param(name, form, marks=pytest.mark.slow)
        for name, form in (
            *((name, form) for name in SEVERAL for form in FORMATS if (name, form) not in QUICK),
            *(("v3.2", "blocks"), ("axk2", "blocks"), ("glm-dsa", "outputs"), ("minimax-m3", "blocks"), ("dots3", "blocks")),
            ("llama4", "outputs"),
            *(
                (name, "blocks")
                for name in ("bamba", "lfm2", "lfm2-moe", "kimi-linear", "minimax", "qwen3.5", "nemotron-h-latent")
            ),
        )
    ),
]


ENDS = ("proj", "linear", "proj_qkvz", "proj_ba", "proj_qkv", "proj_z", "_mqa", "output_gate", ".wq_b", ".wk")
MATRICES = (*ENDS, ".w1", ".w2", ".w3")
"""Ends of the names of those that are packed."""


def packed(weight: torch.Tensor, form: str) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a matrix by their leaves, and the numbers that they mean."""
    if form == "int8":
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().clamp(-127, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes * scales
    tile = {"blocks": (16, 32), "outputs": (1, weight.shape[1]), "matrix": tuple(weight.shape)}[form]
    grid = [-(-size // step) for size, step in zip(weight.shape, tile, strict=True)]
    # Scales that differ widely: none may be applied to another's rows.
    scales = torch.rand(grid) + 0.5
    codes = (weight / TileCodes(torch.ones(weight.shape).to(torch.float8_e4m3fn), scales, tile).dequantize()).to(
        torch.float8_e4m3fn
    )
    meant = TileCodes(codes, scales, tile).dequantize()
    if form == "blocks":
        return {"weight": codes, "weight_scale_inv": scales}, meant
    if form == "outputs":
        return {"weight": codes, "weight_scale": scales}, meant
    return {"weight": codes, "weight_scale": scales[0, 0], "input_scale": torch.tensor(0.5)}, meant


def apart(name: str, tensor: torch.Tensor, kind: str) -> Tensors:
    """Views of each matrix of stacked experts, under the names that most checkpoints have; other tensors as they are."""
    head, _, last = name.rpartition(".")
    if tensor.dim() != 3 or not head.endswith("experts"):
        return {name: tensor}
    if kind in ("kimi_linear", "minimax", "minimax_m3_vl_text"):
        head = head.replace(".mlp.", ".block_sparse_moe.")
    mixtral = (
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        if (".block_sparse_moe." in head and kind != "granitemoehybrid") or kind == "lfm2_moe"
        else {}
    )
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {
        f"{head}.{expert}.{mixtral.get(part, part)}.weight": rows
        for expert, matrix in enumerate(tensor.transpose(1, 2) if kind == "llama4_text" else tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


def write(path: Path, theirs: PreTrainedModel, form: str | None = None) -> ModelFiles:
    """Saves a model's matrices as codes, and gives it the numbers that these mean; None: saves floats."""
    held: Tensors = {}
    for whole, stacked in theirs.state_dict().items():
        for name, tensor in apart(whole, stacked, theirs.config.model_type).items():
            matrix = name.removesuffix(".weight")
            if form is not None and tensor.dim() == 2 and matrix.endswith(MATRICES):
                leaves, meant = packed(tensor, form)
                tensor.copy_(meant)
                held |= {f"{matrix}.{leaf}": one.contiguous() for leaf, one in leaves.items()}
            else:
                held[name] = tensor.clone()
    save_file(held, path)
    config: Any = copy.deepcopy(theirs.config)
    if form is not None:
        config.quantization_config = FORMATS[form]
    return ModelFiles(
        name="test",
        kind="safetensors",
        directory=path.parent,
        weight_files=[path],
        config=config,
        generation_config={"eos_token_id": []},
    )


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_checkpoints_say_what_their_floats_say(name: str, form: str, tmp_path: Path) -> None:
    module: Any = next(module for module in (hybrids, indexed, cases) if name in module.CASES)
    theirs, whole = copy.deepcopy(module.pair(name)[0]), module.pair(name)[1].spec
    files, tokens = write(tmp_path / "model.safetensors", theirs, form), prompt(70)
    expected = [greedy(theirs, tokens, 4)[0]]

    def run(group: Group) -> tuple[list[list[int]], list[str]]:
        spec = whole if group.size == 1 else shard_model(whole, group.rank, ParallelSizes(group.size))
        model = registry.build(spec, "float32", "cpu", group)
        load_weights(model, registry.name_table(model.spec), files, quantization="stored")
        linears = [(path, one) for path, one in model.layers.named_modules() if isinstance(one, Linear)]
        floats = [path for path, one in linears if one.method.format == "floats" and one.in_features % 32 == 0]
        return Bench(model).generate([tokens], 4)[0], floats

    for size in (1, 2):
        for said, floats in on_ranks(size, run):
            assert said == expected
            # Those of heads' gates are stored as floats.
            assert all(path.endswith("gate_proj") for path in floats)


@pytest.mark.parametrize(
    "name", ["falcon-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in SEVERAL if name != "falcon-h1")]
)
def test_floats_are_rounded_to_fp8_while_they_load(name: str, tmp_path: Path) -> None:
    """Whole and on two ranks: all matrices whose sizes are multiples of 16, and the model says something near."""
    theirs, whole = hybrids.pair(name)
    files = write(tmp_path / "model.safetensors", theirs)

    def run(group: Group) -> list[float]:
        spec = whole.spec if group.size == 1 else shard_model(whole.spec, group.rank, ParallelSizes(group.size))
        exact, rounded = (registry.build(spec, "bfloat16", "cpu", group) for _ in range(2))
        for model, quantization in ((exact, "none"), (rounded, "fp8")):
            load_weights(model, registry.name_table(spec), files, quantization=quantization)
        floats, errors = dict(exact.layers.named_modules()), []
        for where, layer in rounded.layers.named_modules():
            if isinstance(layer, Linear):
                assert (layer.method.format == "floats") == bool(layer.in_features % 16 or layer.out_features % 16), where
                errors.append(relative_error(layer.method.dequantize(layer), floats[where].weight))
        assert all(logits.isfinite().all() for logits in Bench(rounded).generate([prompt(13)], 2)[1])
        return errors

    for size in (1, 2):
        for errors in on_ranks(size, run):
            assert 0.01 < max(errors) < 0.04
