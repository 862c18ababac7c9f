"""Each family's tables add to a matrix what an adapter adds to it in the checkpoint, on one rank and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models.cases import CASES, pair

from headrace.errors import ConfigError
from headrace.model_spec import ModelSpec
from headrace.models import registry
from headrace.models.adapters import AdaptedLayer, AdapterTargets, add_tables
from headrace.parallel.layout import ParallelSizes, shard_model
from headrace.sources.adapter import AdapterFiles, AdapterMatrix

RANK, SCALE = 3, 0.5
SEVERAL = {"llama", "qwen3-uneven-wide-v", "olmo2", "gemma4-shared", "qwen2-vl", "deepseek-v2", "qwen3-moe"} & set(CASES)


def write(folder: Path, shapes: dict[str, tuple[int, int]]) -> AdapterFiles:
    """A random adapter of matrices, by their names without ``.weight``."""
    generator = torch.Generator().manual_seed(0)
    tensors, matrices = {}, []
    for name, (outputs, inputs) in shapes.items():
        tensors[f"{name}.a"] = torch.randn(RANK, inputs, generator=generator)
        tensors[f"{name}.b"] = torch.randn(outputs, RANK, generator=generator)
        matrices.append(AdapterMatrix(name, f"{name}.a", f"{name}.b", SCALE))
    save_file(tensors, folder / "adapter.safetensors")
    return AdapterFiles("digest", str(folder / "adapter.safetensors"), tuple(matrices))


def with_tables(spec: ModelSpec) -> AdapterTargets:
    return add_tables(registry.build(spec, "float32", "cpu"), registry.name_table(spec), (), 2, 8, torch.float32, "cpu")


def shape_of(layer: AdaptedLayer) -> tuple[int, ...]:
    shape = layer.out_features, layer.in_features
    return shape if layer.experts == 1 else (layer.experts, *shape)


def addition(layer: AdaptedLayer, slot: int) -> torch.Tensor:
    """``[out_features, in_features]``, or of each expert: what the layer's tables add in a slot."""
    tables = layer.tables
    parts, first = [], 0
    for part, last in enumerate(tables.ends):
        parts.append(tables.b[slot, first:last] @ tables.a[slot, part * tables.rank : (part + 1) * tables.rank])
        first = last
    return torch.cat(parts).view(shape_of(layer))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_an_adapter_of_every_matrix_is_added_to_its_rows(name: str, size: int, tmp_path: Path) -> None:
    whole = pair(name)[1].spec
    usual = with_tables(whole)
    wanted = {
        stored.removesuffix(".weight"): target.matrix_shape(layer.out_features, layer.in_features)
        for stored, target in usual.names.items()
        if (layer := usual.layers.get(target.parameter.removesuffix(".weight"))) is not None
    }
    assert len(wanted) >= 4 * whole.num_layers
    files = write(tmp_path, wanted)
    for rank in range(size):
        targets = usual if size == 1 else with_tables(shard_model(whole, rank, ParallelSizes(size)))
        loaded = targets.read(files, torch.float32)
        expected = {path: torch.zeros(shape_of(layer)) for path, layer in targets.layers.items()}
        generator = torch.Generator().manual_seed(0)
        for module, (outputs, inputs) in wanted.items():
            a, b = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
            target = targets.names.part(f"{module}.weight")
            assert target is not None
            target.fill(expected[target.parameter.removesuffix(".weight")], SCALE * b @ a)
        assert loaded.keys() == expected.keys()
        targets.put(1, loaded)
        assert torch.equal(targets.image(loaded), targets.memory[1])
        for path in targets.layers:
            assert torch.allclose(addition(targets.layers[path], 1), expected[path], atol=1e-5), path
            assert not addition(targets.layers[path], 0).any()


@pytest.mark.parametrize("sizes", [ParallelSizes(1), ParallelSizes(2), ParallelSizes(2, whole_experts=True)], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_stacked_experts_have_one_addition_each(name: str, sizes: ParallelSizes, tmp_path: Path) -> None:
    """The factors in peft's form: the experts' A one below the other, and the columns of their B in turns."""
    whole = pair(name)[1].spec
    module, tensors, deltas, matrices = "model.layers.0.mlp.experts", {}, {}, []
    layers = with_tables(whole).layers
    for parameter in ("gate_up_proj", "down_proj"):
        layer = layers[f"layers.0.mlp.experts.{parameter}"]
        count, a, b = layer.experts, f"{parameter}.a", f"{parameter}.b"
        tensors[a] = torch.randn(count * RANK, layer.in_features)
        tensors[b] = torch.randn(layer.out_features, RANK * count)
        each = tensors[b].view(-1, RANK, count).permute(2, 0, 1)
        deltas[parameter] = SCALE * each @ tensors[a].view(count, RANK, -1)
        matrices.append(AdapterMatrix(module, a, b, SCALE, count, ("gate_up_proj", "down_proj")))
    save_file(tensors, tmp_path / "adapter.safetensors")
    files = AdapterFiles("digest", str(tmp_path / "adapter.safetensors"), tuple(matrices))
    for rank in range(sizes.tensor):
        targets = with_tables(whole if sizes.tensor == 1 else shard_model(whole, rank, sizes))
        loaded = targets.read(files, torch.float32)
        names = targets.names.chosen([f"{module}.{parameter}" for parameter in deltas])
        for parameter, delta in deltas.items():
            key = f"layers.0.mlp.experts.{parameter}"
            layer, target = targets.layers[key], names.part(f"{module}.{parameter}")
            assert target is not None
            layer.tables.put(1, loaded[key])
            expected = torch.zeros(shape_of(layer))
            target.fill(expected, delta if target.layout is None or not target.layout.transposed else delta.mT)
            assert torch.allclose(addition(layer, 1), expected, atol=1e-5)


def test_kernels_of_every_shape_are_compiled_before_steps() -> None:
    """Interpreted here. Layers of one shape have the same kernels."""
    targets = with_tables(pair("qwen3-moe")[1].spec)
    seen: list[tuple[object, int]] = []
    for layer in {id(layer.module): layer.module for layer in targets.layers.values()}.values():
        layer.register_forward_pre_hook(lambda module, given: seen.append((module, len(given[0]))))
        for tensor in layer.parameters():
            tensor.data.zero_()
    targets.warm_up(70)
    kinds = {(layer.in_features, layer.sizes) for layer in targets.layers.values() if layer.experts == 1}
    assert sorted(tokens for _, tokens in seen) == sorted([64, 70] * (len(kinds) + 1))
    assert not targets.rows.segments and targets.rows.places is None


def test_a_whole_matrix_of_a_checkpoint_is_added_to_the_parts_of_a_fused_layer(tmp_path: Path) -> None:
    spec = pair("qwen3")[1].spec
    targets = with_tables(spec)
    layer = targets.layers["layers.1.self_attn.qkv_proj"]
    names = targets.names
    names.instead("model.layers.1.self_attn.qkv_proj.weight", "layers.1.self_attn.qkv_proj.weight")
    shape = layer.out_features, layer.in_features
    files = write(tmp_path, {"model.layers.1.self_attn.qkv_proj": shape})
    loaded = targets.read(files, torch.float32)
    layer.tables.put(0, loaded["layers.1.self_attn.qkv_proj"])
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(RANK, shape[1], generator=generator), torch.randn(shape[0], RANK, generator=generator)
    assert torch.allclose(addition(layer, 0), SCALE * b @ a, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        ("model.layers.9.self_attn.q_proj", (64, 64), "the model has no such matrix"),
        ("model.embed_tokens", (64, 64), "adapters of this matrix are not supported"),
        ("lm_head", (64, 64), "adapters of this matrix are not supported"),
        ("model.layers.0.self_attn.q_proj", (49, 48), r"q_proj.b has 49 outputs, and .* is \[48, 48\]"),
        ("model.layers.0.self_attn.q_proj", (48, 49), r"q_proj.a has 49 inputs"),
    ],
)
def test_a_matrix_that_does_not_fit_is_named(module: str, shape: tuple[int, int], why: str, tmp_path: Path) -> None:
    targets = with_tables(pair("llama")[1].spec)
    with pytest.raises(ConfigError, match=why):
        targets.read(write(tmp_path, {module: shape}), torch.float32)
