"""One heterogeneous model, loaded from every way in which checkpoints hold q, k and v: each by its own layer's widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models.export import export
from transformers import LlamaConfig, PretrainedConfig

from headrace.errors import ConfigError
from headrace.model_spec import ModelSpec
from headrace.model_spec.projection import grouped_rows, input_matrices
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.parallel.shards import attention_cuts, dense_cuts
from headrace.weights.load import load_weights
from headrace.weights.names import NameTable, StoredLayout

from .models import config, expected_parameters, files, parameters_of, spec, tensors, write_safetensors

HEADS, HEAD_DIM, V_HEAD_DIM = 12, 32, 16
KV_HEADS = [6, 2, 1]


@pytest.fixture(scope="module")
def uneven() -> PretrainedConfig:
    made = config(
        LlamaConfig,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        attention_bias=True,
    )
    made.num_key_value_heads_list = KV_HEADS
    made.v_head_dim = V_HEAD_DIM
    return made


def load(hf_config: PretrainedConfig, paths: list[Path], **options: str) -> Decoder:
    model = registry.build(spec(hf_config), "float32", "cpu")
    load_weights(model, registry.name_table(model.spec), files(hf_config, "safetensors", paths), **options)
    return model


def check(model: Decoder, hf_config: PretrainedConfig, weights: Mapping[str, torch.Tensor]) -> None:
    held = parameters_of(model)
    for name, expected in expected_parameters(hf_config, weights).items():
        assert torch.equal(held[name], expected), name


def by_hand(weight: Mapping[str, torch.Tensor], kv_heads: int) -> torch.Tensor:
    """[q ... | gate ... | k | v] of each KV group, by slicing; the same of what one rank holds."""
    rows = []
    for index in range(kv_heads):
        for part in (weight[name] for name in ("q", "gate") if name in weight):
            group = len(part) // kv_heads
            rows.append(part[index * group : (index + 1) * group])
        rows.append(weight["k"][index * HEAD_DIM : (index + 1) * HEAD_DIM])
        rows.append(weight["v"][index * V_HEAD_DIM : (index + 1) * V_HEAD_DIM])
    return torch.cat(rows)


def fused(weights: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The same checkpoint with q, k and v in one tensor: ``plain`` below each other, ``grouped`` by KV group."""
    out = {name: tensor for name, tensor in weights.items() if not any(f".{part}_proj." in name for part in "qkv")}
    for layer, kv_heads in enumerate(KV_HEADS):
        here = f"model.layers.{layer}.self_attn."
        for end in ("weight", "bias"):
            parts = {part: weights[f"{here}{part}_proj.{end}"] for part in "qkv"}
            if kind == "plain":
                out[f"{here}qkv_proj.{end}"] = torch.cat(list(parts.values()))
            else:
                out[f"{here}query_key_value.{end}"] = by_hand(parts, kv_heads)
    return out


def test_widths_are_the_layers_own(uneven: PretrainedConfig) -> None:
    weights = tensors(uneven)
    assert [len(weights[f"model.layers.{i}.self_attn.v_proj.weight"]) for i in range(3)] == [6 * 16, 2 * 16, 16]
    assert [len(weights[f"model.layers.{i}.self_attn.k_proj.weight"]) for i in range(3)] == [6 * 32, 2 * 32, 32]
    assert weights["model.layers.1.self_attn.o_proj.weight"].shape == (96, 12 * 16)


@pytest.mark.parametrize("kind", ["split", "plain", "grouped"])
def test_fused_split_and_interleaved(uneven: PretrainedConfig, kind: str, tmp_path: Path) -> None:
    weights = tensors(uneven)
    stored = weights if kind == "split" else fused(weights, kind)
    check(load(uneven, write_safetensors(tmp_path, stored)), uneven, weights)


def test_an_interleaved_matrix_is_packed_in_order(uneven: PretrainedConfig, tmp_path: Path) -> None:
    weights = tensors(uneven)
    for kind in ("split", "grouped"):
        (tmp_path / kind).mkdir()
    split = load(uneven, write_safetensors(tmp_path / "split", weights), quantization="int8")
    grouped = load(uneven, write_safetensors(tmp_path / "grouped", fused(weights, "grouped")), quantization="int8")
    x = torch.randn(3, 96)
    for a, b in zip(split.layers, grouped.layers, strict=True):
        assert torch.equal(a.self_attn.qkv_proj(x), b.self_attn.qkv_proj(x))


def test_a_fused_tensor_of_another_width_is_refused(uneven: PretrainedConfig, tmp_path: Path) -> None:
    """V as wide as K: what a loader that knows one width would make of it."""
    stored = fused(tensors(uneven), "grouped")
    stored["model.layers.1.self_attn.query_key_value.weight"] = torch.zeros((HEADS + 2 * 2) * HEAD_DIM, 96)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.query_key_value\.weight .* \[512, 96\].*means \[480, 96\]"):
        load(uneven, write_safetensors(tmp_path, stored))


def shards(
    model: ModelSpec, weights: Mapping[str, torch.Tensor], size: int, *, fuse: str, padding: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors that each rank of an engine would save."""
    vocabulary = model.vocab_size + padding
    ranks: list[dict[str, torch.Tensor]] = []
    for rank in range(size):
        out: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            if "embed_tokens" in name or "lm_head" in name:
                padded = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
                out[name] = padded[rank * vocabulary // size : (rank + 1) * vocabulary // size]
                continue
            words = name.split(".")
            if "_proj" not in name:
                out[name] = tensor
                continue
            layer, part, matrix = int(words[2]), words[3], words[4].removesuffix("_proj")
            cuts = (
                attention_cuts(model.layers[layer], rank, size)
                if part == "self_attn"
                else dense_cuts(model.mlps[layer], rank, size)
            )
            whole = words[5] == "bias" and matrix in ("o", "down")
            out[name] = tensor if whole else cuts[matrix].of(tensor)
        if fuse:
            for layer in range(model.num_layers):
                here = f"model.layers.{layer}."
                names = [one.name for one in input_matrices(model.layers[layer])]
                for end in ("weight", "bias"):
                    parts = {p: out.pop(f"{here}self_attn.{p}_proj.{end}") for p in names}
                    if fuse == "plain":
                        out[f"{here}self_attn.qkv_proj.{end}"] = torch.cat(list(parts.values()))
                    else:
                        own = max(1, model.layers[layer].num_kv_heads // size)
                        out[f"{here}self_attn.{fuse}.{end}"] = by_hand(parts, own)
                out[f"{here}mlp.gate_up_proj.weight"] = torch.cat(
                    [out.pop(f"{here}mlp.{p}_proj.weight") for p in ("gate", "up")]
                )
        ranks.append(out)
    return ranks


def write_shards(folder: Path, ranks: list[dict[str, torch.Tensor]]) -> list[Path]:
    paths = []
    for rank, held in enumerate(ranks):
        for part, names in enumerate((list(held)[::2], list(held)[1::2])):
            paths.append(folder / f"model-rank-{rank}-part-{part}.safetensors")
            save_file({name: held[name].contiguous() for name in names}, paths[-1])
    return paths


@pytest.mark.parametrize("fuse", ["", "plain", "query_key_value", "linear_qkv"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_that_ranks_saved(uneven: PretrainedConfig, size: int, fuse: str, tmp_path: Path) -> None:
    """KV heads 6, 2 and 1 for two ranks; four ranks hold 2 and 1, which makes replicas of both. q, k and v are apart, one
    below the other, or interleaved by KV group.
    """
    if size == 4:
        uneven = type(uneven)(**uneven.to_dict())
        uneven.num_key_value_heads_list = [4, 2, 1]
    weights = tensors(uneven)
    ranks = shards(spec(uneven), weights, size, fuse=fuse)
    check(load(uneven, write_shards(tmp_path, ranks)), uneven, weights)


@pytest.mark.parametrize("fuse", ["", "plain", "query_key_value"])
@pytest.mark.parametrize("size", [2, 4])
def test_gates_are_cut_as_the_queries_are(uneven: PretrainedConfig, size: int, fuse: str, tmp_path: Path) -> None:
    """Gates are cut by their own width, which is that of values; also where KV heads beside them in one matrix have
    replicas."""
    uneven = type(uneven)(**uneven.to_dict())
    uneven.num_key_value_heads_list = [4, 2, 1]
    made = spec(uneven)
    gated = dataclasses.replace(made, layers=tuple(dataclasses.replace(one, output_gate=True) for one in made.layers))
    model, table = registry.build(gated, "float32", "cpu"), registry.name_table(gated)
    weights = {name: torch.randn(tensor.shape) for name, tensor in export(table, model)}
    assert len(weights["model.layers.1.self_attn.gate_proj.weight"]) == HEADS * V_HEAD_DIM
    paths = write_shards(tmp_path, shards(gated, weights, size, fuse=fuse))
    load_weights(model, table, files(uneven, "safetensors", paths))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in export(table, model))


def test_a_padded_vocabulary(uneven: PretrainedConfig, tmp_path: Path) -> None:
    weights = tensors(uneven)
    check(load(uneven, write_shards(tmp_path, shards(spec(uneven), weights, 2, fuse="plain", padding=32))), uneven, weights)


def test_parts_that_are_wrong_are_refused(uneven: PretrainedConfig, tmp_path: Path) -> None:
    ranks = shards(spec(uneven), tensors(uneven), 2, fuse="plain")
    paths = write_shards(tmp_path, ranks)
    with pytest.raises(ConfigError, match=r"parts of ranks \[1\]: one is missing"):
        load(uneven, [path for path in paths if "rank-1" in path.name])
    right = ranks[1]["model.layers.2.self_attn.qkv_proj.weight"]
    ranks[1]["model.layers.2.self_attn.qkv_proj.weight"] = torch.zeros(6 * 32 + 2 * 32, 96)
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn\.qkv_proj\.weight of rank 1 .* each holds 240"):
        load(uneven, write_shards(tmp_path, ranks))
    ranks[1]["model.layers.2.self_attn.qkv_proj.weight"] = right
    del ranks[1]["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"the part of rank 1 lacks model\.norm\.weight"):
        load(uneven, write_shards(tmp_path, ranks))


def test_interleaved_parts_without_replicas_are_slices_of_the_whole(uneven: PretrainedConfig) -> None:
    """All ranks have KV heads of their own in this layer: the parts are what an engine that cuts the fused matrix itself would
    save."""
    weights = tensors(uneven)
    ranks = shards(spec(uneven), weights, 2, fuse="query_key_value")
    name = "model.layers.0.self_attn.query_key_value.weight"
    assert torch.equal(torch.cat([rank[name] for rank in ranks]), fused(weights, "grouped")[name])


def test_an_interleaved_part_of_another_width_is_refused(uneven: PretrainedConfig, tmp_path: Path) -> None:
    """Four ranks that share one KV head among them cannot each have a quarter of it."""
    uneven = type(uneven)(**uneven.to_dict())
    uneven.num_key_value_heads_list = [4, 4, 1]
    ranks = shards(spec(uneven), tensors(uneven), 4, fuse="query_key_value")
    name = "model.layers.2.self_attn.query_key_value.weight"
    for rank in ranks:
        rank[name] = torch.zeros((12 * 32 + 32 + 16) // 4, 96)
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn\.query_key_value\.weight of rank 0 .*\[108, 96\].* holds 144"):
        load(uneven, write_shards(tmp_path, ranks))


def test_layouts_there_and_back(uneven: PretrainedConfig) -> None:
    rows = partial(grouped_rows, spec(uneven).layers[1])
    stored = torch.randn(len(rows()), 5)
    for layout in (StoredLayout(rows), StoredLayout(rows, transposed=True), StoredLayout(transposed=True)):
        there = stored.mT.contiguous() if layout.transposed else stored
        part = layout.take(there)
        assert layout.stored_shape(tuple(part.shape)) == there.shape
        assert torch.equal(layout.give(part), there)
    table = NameTable()
    table.add("w", "weight", layout=StoredLayout(rows))
    module = torch.nn.Linear(5, len(rows()), bias=False)
    part = table.part("w")
    assert part is not None
    part.fill(module.weight.data, stored)
    assert torch.equal(dict(export(table, module))["w"], stored)
