"""A tensor-parallel rank reads its part of a checkpoint and no more; the parts of all ranks are the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.models.cases import CASES, pair
from support.models.export import export
from support.models.packers import Rounded
from support.quant_blocks import Type, random_blocks
from transformers import GptOssConfig

from headrace.core.weights import PartSum, whole_sum
from headrace.errors import ConfigError
from headrace.layers.linear import Linear, UnquantizedMethod
from headrace.layers.stored import QuantSpec, StoredMatrix
from headrace.model_spec import ModelSpec
from headrace.models import registry
from headrace.models.cuts import parameter_cuts
from headrace.models.decoder import Decoder
from headrace.models.update import update_plan
from headrace.parallel.layout import ParallelSizes, shard_model, workable_sizes
from headrace.quant.float_codes import TileCodes
from headrace.quant.formats.scheme import MatrixFormat, Rule, Scheme
from headrace.quant.groups import GroupCodes
from headrace.weights import load as load_module
from headrace.weights.checksum import checksum
from headrace.weights.load import load_weights
from headrace.weights.names import Slice
from headrace.weights.report import LoadReport
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint
from headrace.weights.update import WeightUpdate, WholeUpdate, facts_of

from .models import config, files, spec, tensors, write_gguf, write_safetensors


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[SafetensorsCheckpoint]:
    """The checkpoints that were opened."""
    found: list[SafetensorsCheckpoint] = []

    class Counting(SafetensorsCheckpoint):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(load_module, "SafetensorsCheckpoint", Counting)
    return found


def part_of(whole: ModelSpec, rank: int, size: int) -> Decoder:
    model = registry.build(shard_model(whole, rank, ParallelSizes(size)), "float32", "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def load(model: Decoder, hf_config: Any, kind: str, paths: list[Path], **options: Any) -> LoadReport:
    return load_weights(model, registry.name_table(model.spec), files(hf_config, kind, paths), **options)


def check_parts(whole: Decoder, ranks: list[Decoder]) -> None:
    """Each parameter of each rank is the cut of the whole one; all cuts together are the whole."""
    covered: dict[str, torch.Tensor] = {}
    expected, empty = dict(whole.named_parameters()), registry.build(whole.spec, "float32", "meta")
    for rank in ranks:
        shard = rank.spec.shard
        assert shard is not None
        cuts = parameter_cuts(empty, shard, rank.spec.mlps)
        for name, parameter in rank.named_parameters():
            cut = cuts.get(name)
            if cut is None:
                assert torch.equal(parameter, expected[name]), name
                continue
            seen = covered.setdefault(name, torch.zeros(expected[name].shape[cut.axis], dtype=torch.bool))
            at = 0
            for start, stop in cut.ranges:
                held = parameter.narrow(cut.axis, at, stop - start)
                assert torch.equal(held, expected[name].narrow(cut.axis, start, stop - start)), name
                seen[start:stop] = True
                at += stop - start
            assert parameter.shape[cut.axis] == at + cut.padding
            assert not parameter.narrow(cut.axis, at, cut.padding).any()
    for name, seen in covered.items():
        # Rank 0 holds the whole bias of a product that is summed, which has no cut there.
        assert seen.all() or name.endswith(("o_proj.bias", "down_proj.bias", "down_proj_bias")), name


def check_sums(ranks: list[Decoder], state: dict[str, torch.Tensor]) -> None:
    """The parts' sums add up to those of the checkpoint's tensors, under its names."""
    facts = [facts_of(name, tensor) for name, tensor in state.items()]
    found: dict[str, list[PartSum]] = {}
    for rank, model in enumerate(ranks):
        plan = update_plan(model, facts)
        for name, parts in plan.sums(rank).items():
            found.setdefault(name, []).extend(parts)
    for name, tied in plan.tied().items():
        found.setdefault(name, found[tied])
    for name, tensor in state.items():
        assert whole_sum(found.pop(name)) == checksum(tensor), name
    assert not found.keys() - plan.tied().keys()


def check_ranks(whole: Decoder, hf_config: Any, *source: Any, **options: Any) -> None:
    """``check_parts`` of two ranks that load the same weights."""
    ranks = [part_of(spec(hf_config), rank, 2) for rank in range(2)]
    for model in ranks:
        load(model, hf_config, *source, **options)
    check_parts(whole, ranks)


WORKS = [name for name in CASES if name not in ("llama-head-dim", "llama-uneven-narrow-v", "qwen3-uneven")]


@pytest.mark.parametrize("name", WORKS)
def test_ranks_hold_the_parts_of_every_family(name: str, tmp_path: Path, opened: list[SafetensorsCheckpoint]) -> None:
    theirs, whole = pair(name)
    size = max(size for size in workable_sizes(whole.spec) if size <= 4)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if tensor.dim()}
    table = registry.name_table(whole.spec).chosen(state)
    state = {name: tensor for name, tensor in state.items() if table.part(name) or table.tied(name)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    ranks, total = [], sum(tensor.nbytes for tensor in state.values())
    for rank in range(size):
        model = part_of(whole.spec, rank, size)
        report = load(model, theirs.config, "safetensors", [tmp_path / "model.safetensors"])
        assert report.nbytes_read == opened[-1].nbytes_read
        assert opened[-1].nbytes_read < total
        ranks.append(model)
    check_parts(whole, ranks)
    check_sums(ranks, state)


def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path, opened: list[SafetensorsCheckpoint]) -> None:
    hf_config = config(tie_word_embeddings=True, vocab_size=256)
    weights = tensors(hf_config)
    paths = write_safetensors(tmp_path, weights, 2)
    matrices = sum(tensor.nbytes for tensor in weights.values() if tensor.dim() == 2)
    norms = sum(tensor.nbytes for tensor in weights.values() if tensor.dim() == 1)
    for rank in (0, 1):
        seen: list[tuple[int, int]] = []

        def progress(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        report = load(part_of(spec(hf_config), rank, 2), hf_config, "safetensors", paths, progress=progress)
        assert opened[-1].nbytes_read == report.nbytes_read == matrices // 2 + norms
        assert seen[-1] == (report.nbytes_read, report.nbytes_read)


def test_dummy_weights_are_parts_of_the_same_ones() -> None:
    hf_config = config(attention_bias=True)
    whole = registry.build(spec(hf_config), "float32", "cpu")
    load(whole, hf_config, "dummy", [], seed=3)
    check_ranks(whole, hf_config, "dummy", [], seed=3)


@pytest.mark.parametrize("tile", [(32, 64), (48, 40)], ids=str)
def test_tiles_of_fp8_are_cut_with_their_scales(tile: tuple[int, int], tmp_path: Path) -> None:
    """The cut is on the border of two tiles or in the middle of one."""
    hf_config = config(
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(tile)}
    )
    held, meant = {}, {}
    for name, tensor in tensors(hf_config).items():
        held[name] = meant[name] = tensor
        if "_proj" in name:
            held[name] = (tensor * 1000).to(torch.float8_e4m3fn)
            grid = [-(-size // each) for size, each in zip(tensor.shape, tile, strict=True)]
            held[name + "_scale_inv"] = torch.rand(grid)
            meant[name] = TileCodes(held[name], held[name + "_scale_inv"], tile).dequantize()
    save_file(held, tmp_path / "model.safetensors")
    whole = registry.build(spec(hf_config), "float32", "cpu")
    load(whole, hf_config, "safetensors", [tmp_path / "model.safetensors"])
    for name, parameter in registry.name_table(whole.spec).items():
        assert torch.equal(parameter.view(dict(whole.named_parameters())[parameter.parameter]), meant[name])
    check_ranks(whole, hf_config, "safetensors", [tmp_path / "model.safetensors"])


WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, {}),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False}, {"bits": 8, "group": 512}),
    "act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}, {"shuffled": True}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, {}),
    "awq-odd": ({"quant_method": "awq", "bits": 4, "group_size": 48}, {"group": 48}),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_cut_with_their_scales(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that a cut splits become smaller ones."""
    scheme, options = WORDS[name]
    hf_config = config(quantization_config=scheme)
    held, meant = {}, {}
    for full, tensor in tensors(hf_config).items():
        held[full] = meant[full] = tensor
        if "_proj" in full:
            rows, columns = tensor.shape
            group = options.get("group", 32)
            order = torch.arange(columns) // group
            if "shuffled" in options:
                order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(0))]
            made = Rounded(rows, columns, bits=options.get("bits", 4), group=group, order=order)
            meant[full] = made.meant
            del held[full]
            stored = made.awq() if "awq" in name else made.gptq()
            held |= {full.removesuffix("weight") + leaf: one for leaf, one in stored.items()}
    save_file(held, tmp_path / "model.safetensors")
    whole = registry.build(spec(hf_config), "float32", "cpu")
    load(whole, hf_config, "safetensors", [tmp_path / "model.safetensors"])
    for full, target in registry.name_table(whole.spec).items():
        assert torch.equal(target.view(dict(whole.named_parameters())[target.parameter]), meant[full])
    compared = []
    load_floats = UnquantizedMethod.load

    def load_both(method: UnquantizedMethod, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        for part in parts:
            codes = part.codes
            assert (codes is None) == (part.spec is None)
            if isinstance(codes, GroupCodes):
                compared.append(codes.group)
                assert torch.equal(codes.dequantize(), part.read())
        return load_floats(method, layer, parts)

    monkeypatch.setattr(UnquantizedMethod, "load", load_both)
    check_ranks(whole, hf_config, "safetensors", [tmp_path / "model.safetensors"])
    assert len(compared) == 28
    # The inputs of o_proj and down_proj, which begin or end within a group.
    assert sum(group < 32 for group in compared) == (8 if name == "awq-odd" else 0)


def test_parts_of_scaled_tensors_are_those_of_the_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    held = {
        "m_blocks": torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator),
        "m_scales": torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8, generator=generator),
        "t": torch.randn(21, 34, generator=generator).to(torch.float8_e4m3fn),
        "t_scale_inv": torch.rand(6, 5, generator=generator),
    }
    save_file(held, tmp_path / "a.safetensors")
    inner = SafetensorsCheckpoint([tmp_path / "a.safetensors"])
    blocks = MatrixFormat("mxfp4_blocks", QuantSpec(codes="mxfp4", group=(1, 32), scale="e8m0"))
    tiles = MatrixFormat("scaled", QuantSpec(codes="e4m3", group=(4, 8)))
    checkpoint = ScaledCheckpoint(inner, Scheme("test", (Rule("", blocks, "m", "m".__eq__), Rule("", tiles))))
    for name, axis, ranges in (
        ("m_blocks", 0, ((1, 3),)),
        ("m_blocks", 1, ((0, 2), (7, 10))),
        ("m_blocks", 2, ((32, 64),)),
        ("m_blocks", 2, ((5, 40), (100, 128))),
        ("t", 0, ((4, 8),)),
        ("t", 0, ((3, 9), (20, 21))),
        ("t", 1, ((16, 34),)),
        ("t", 1, ((1, 7), (15, 17))),
    ):
        where = Slice(axis, ranges)
        assert torch.equal(checkpoint.read(name, where), where.of(checkpoint.read(name))), (name, where)
    before = inner.nbytes_read
    checkpoint.read("m_blocks", Slice(2, ((32, 64),)))
    assert inner.nbytes_read - before == (held["m_blocks"].nbytes + held["m_scales"].nbytes) // 4


@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts_of_mxfp4_are_cut(whole_experts: bool, tmp_path: Path, opened: list[SafetensorsCheckpoint]) -> None:
    """Gate and up in turns, in blocks of 32 inputs."""
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    scheme = {"quant_method": "mxfp4"}
    hf_config = GptOssConfig(architectures=["GptOssForCausalLM"], quantization_config=scheme, **numbers, **heads)
    state = {}
    whole = registry.build(spec(hf_config), "float32", "cpu")
    for parameter in whole.parameters():
        parameter.data.normal_()
    for name, tensor in export(registry.name_table(whole.spec), whole):
        state[name] = tensor.clone().contiguous()
        if name.endswith("_proj") and "experts" in name:
            count, inputs, outputs = tensor.shape
            state[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.randint(120, 130, (count, outputs, inputs // 32), dtype=torch.uint8)
            del state[name]
    save_file(state, tmp_path / "model.safetensors")
    load(whole, hf_config, "safetensors", [tmp_path / "model.safetensors"])
    ranks = []
    for rank in range(2):
        own = shard_model(whole.spec, rank, ParallelSizes(2, whole_experts))
        assert (own.mlps[0].held is not None) is whole_experts  # type: ignore[union-attr]
        ranks.append(registry.build(own, "float32", "cpu"))
        load(ranks[-1], hf_config, "safetensors", [tmp_path / "model.safetensors"])
        assert opened[-1].nbytes_read < 0.7 * sum(tensor.nbytes for tensor in state.values())
    check_parts(whole, ranks)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_packed_matrices_are_cut_before_they_are_packed(quantization: str, tmp_path: Path) -> None:
    """Groups of inputs stay whole, so that a rank has the codes of the whole matrix."""
    hf_config = config(tie_word_embeddings=True)
    paths = write_safetensors(tmp_path, tensors(hf_config))

    def packed(model: Decoder) -> Decoder:
        load(model, hf_config, "safetensors", paths, quantization=quantization)
        return model

    whole = packed(registry.build(spec(hf_config), "float32", "cpu"))
    ranks = [packed(part_of(spec(hf_config), rank, 2)) for rank in range(2)]
    unpacked = [_unpacked(one) for one in (whole, *ranks)]
    check_parts(unpacked[0], unpacked[1:])


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q6_K, Type.BF16], ids=lambda kind: kind.name)
def test_matrices_of_gguf_are_cut(kind: Type, quantization: str, tmp_path: Path) -> None:
    """The rows of q and k are in another order than the model's, and codes in blocks."""
    hf_config = config(tie_word_embeddings=True)

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if kind == Type.BF16:
            return torch.from_numpy(np.ascontiguousarray(rows)).bfloat16().view(torch.uint8).numpy(), kind
        return random_blocks(kind, *rows.shape, seed=len(name)), kind

    path = write_gguf(tmp_path / "m.gguf", "llama", tensors(hf_config), encode)

    def loaded(model: Decoder) -> Decoder:
        load(model, hf_config, "gguf", [path], quantization=quantization)
        return model

    whole = loaded(registry.build(spec(hf_config), "float32", "cpu"))
    ranks = [loaded(part_of(spec(hf_config), rank, 2)) for rank in range(2)]
    if quantization == "none":
        check_parts(whole, ranks)
    else:
        unpacked = [_unpacked(one) for one in (whole, *ranks)]
        check_parts(unpacked[0], unpacked[1:])


def _unpacked(model: Decoder) -> Decoder:
    """The model with the floats that its packed matrices stand for; the head's are its own."""
    plain = registry.build(dataclasses.replace(model.spec, tie_word_embeddings=False), "float32", "cpu")
    for path, module in plain.named_modules():
        if isinstance(module, Linear):
            module.weight.data.copy_(model.get_submodule(path).method.dequantize(model.get_submodule(path)))  # type: ignore[operator, union-attr]
    for name, parameter in model.named_parameters():
        plain.get_parameter(name).data.copy_(parameter)
    return plain


def test_a_cut_through_a_group_of_codes_is_refused(tmp_path: Path) -> None:
    hf_config = config(intermediate_size=96, hidden_size=64, head_dim=32)
    paths = write_safetensors(tmp_path, tensors(hf_config))
    with pytest.raises(ConfigError, match="48 inputs are not a multiple of 32"):
        load(part_of(spec(hf_config), 0, 2), hf_config, "safetensors", paths, quantization="int4")


def test_an_update_reaches_the_part_that_a_rank_holds() -> None:
    hf_config = config(tie_word_embeddings=True)
    weights = tensors(hf_config)
    ranks = [part_of(spec(hf_config), rank, 2) for rank in range(2)]
    for model in ranks:
        given = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        update = WholeUpdate(partial(WeightUpdate, registry.name_table(model.spec), dict(model.named_parameters())), given)
        assert update.write() == len(weights)
        with pytest.raises(ConfigError, match=r"k_proj.weight has the shape \[128, 256\], the update \[64, 256\]"):
            half = {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 256)}
            WholeUpdate(partial(WeightUpdate, registry.name_table(model.spec), dict(model.named_parameters())), half)
        with pytest.raises(ConfigError, match=r"ties lm_head\.weight to embed_tokens\.weight, and the update gives it another"):
            other = {"lm_head.weight": torch.zeros(96, 256)}
            WholeUpdate(partial(WeightUpdate, registry.name_table(model.spec), dict(model.named_parameters())), other)
    whole = registry.build(spec(hf_config), "float32", "cpu")
    WholeUpdate(partial(WeightUpdate, registry.name_table(whole.spec), dict(whole.named_parameters())), weights).write()
    check_parts(whole, ranks)
