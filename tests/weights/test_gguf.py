"""GGUF: types, names, order of rows; and the embedded model against transformers' own reading of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from support.models.export import export
from support.models.harness import Bench
from support.quant_blocks import HALVES, Type, random_blocks
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.models import registry
from headrace.quant.registry import QUANTIZATIONS, find
from headrace.sources.files import find_model
from headrace.text.tokenizer import load_tokenizer
from headrace.weights.gguf import READABLE, GGUFCheckpoint
from headrace.weights.load import load_weights

from .models import config, expected_parameters, files, parameters_of, permuted, spec, tensors, write_gguf

PLAIN = (Type.F32, Type.F16, Type.BF16)
BLOCKS = tuple(HALVES)
ARCHS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config}


def loaded(hf_config: PretrainedConfig, path: Path, dtype: str = "float32", quantization: str = "none") -> torch.nn.Module:
    model = registry.build(spec(hf_config), dtype, "cpu")
    load_weights(model, registry.name_table(model.spec), files(hf_config, "gguf", [path]), quantization=quantization)
    return model


def plain(kind: Type, rows: np.ndarray) -> np.ndarray:
    if kind == Type.F32:
        return rows
    dtype = torch.float16 if kind == Type.F16 else torch.bfloat16
    return torch.from_numpy(rows.copy()).to(dtype).view(torch.int16).numpy().view(np.uint8)


def test_the_types_are_those_we_test() -> None:
    assert {*PLAIN, *BLOCKS} == READABLE


def dequantized(model: torch.nn.Module, name: str) -> torch.Tensor:
    layer = model.get_submodule(name)
    return layer.method.dequantize(layer)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_types(tmp_path: Path, kind: Type, arch: str) -> None:
    hf_config = config(ARCHS[arch], tie_word_embeddings=arch == "llama")
    weights = tensors(hf_config)
    path = write_gguf(tmp_path / "m.gguf", arch, weights, lambda name, rows: (plain(kind, rows), kind))
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    rounded = {name: tensor.to(stored).float() if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    expected = expected_parameters(hf_config, rounded)
    got = parameters_of(loaded(hf_config, path))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_block_types(tmp_path: Path, kind: Type, arch: str) -> None:
    """Blocks as they lie in the file, decoded by the gguf package and put in order by hand."""
    hf_config = config(ARCHS[arch])
    expected: dict[str, torch.Tensor] = dict(tensors(hf_config))
    heads = {"q_proj": 4, "k_proj": 2}

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        blocks = random_blocks(kind, *rows.shape, seed=len(name))
        values = dequantize(blocks, kind)
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            order = permuted(np.arange(len(values)), heads[projection])
            values = values[np.argsort(order)]
        expected[name] = torch.from_numpy(values)
        return blocks, kind

    path = write_gguf(tmp_path / "m.gguf", arch, tensors(hf_config), encode)
    for quantization in ("none", "int4"):
        model = loaded(hf_config, path, "float32", quantization)
        wanted = expected_parameters(hf_config, expected)
        for name, tensor in parameters_of(model).items():
            if name in wanted and ".bias" not in name:
                assert torch.equal(tensor, wanted[name]), name
        if quantization == "int4":
            for name in ("layers.1.self_attn.qkv_proj", "layers.0.mlp.down_proj", "lm_head"):
                held, exact = dequantized(model, name), wanted[f"{name}.weight"]
                assert float((held - exact).norm() / exact.norm()) < 0.01


def test_mixed_types_in_a_fused_matrix(tmp_path: Path) -> None:
    """Files of the M kind have a v that is finer than q and k."""
    hf_config = config(Qwen2Config)
    expected: dict[str, torch.Tensor] = {}

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        kind = Type.Q6_K if "v_proj" in name else Type.Q4_K
        blocks = random_blocks(kind, *rows.shape)
        expected[name] = torch.from_numpy(dequantize(blocks, kind))
        return blocks, kind

    path = write_gguf(tmp_path / "m.gguf", "qwen2", tensors(hf_config), encode)
    model = registry.build(spec(hf_config), "bfloat16", "cpu")
    table = registry.name_table(model.spec)
    report = load_weights(model, table, files(hf_config, "gguf", [path]), quantization="int4")
    exact = torch.cat([expected[name] for name in table.names("layers.0.self_attn.qkv_proj.weight")])
    held = dequantized(model, "layers.0.self_attn.qkv_proj")
    assert float((held - exact).norm() / exact.norm()) < 0.01
    (decision,) = (entry for entry in report.decisions if "qkv_proj" in entry.name)
    assert "Q4_K and Q6_K" in decision.reason
    assert "8" in decision.value


MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "mlp_only_layers": []}


def test_experts_are_parts_of_one_tensor(tmp_path: Path) -> None:
    """The parts of a fused matrix have several types, as in files of the M kind; routers are floats."""
    hf_config = config(Qwen3MoeConfig, **MIXTURE)
    expected = dict(tensors(hf_config))

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if ".experts." not in name:
            return rows, Type.F32
        kind = Type.Q6_K if "down_proj" in name else Type.BF16 if "up_proj" in name else Type.Q4_K
        if kind == Type.BF16:
            expected[name] = torch.from_numpy(rows).bfloat16().float()
            return plain(kind, rows), kind
        blocks = random_blocks(kind, *rows.shape, seed=int(name.split(".")[5]))
        expected[name] = torch.from_numpy(dequantize(blocks, kind))
        return blocks, kind

    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors(hf_config), encode)
    got, wanted = parameters_of(loaded(hf_config, path)), expected_parameters(hf_config, expected)
    for name, tensor in got.items():
        assert torch.equal(tensor.reshape(-1), wanted[name].reshape(-1)), name
    packed = loaded(hf_config, path, "bfloat16", "int8")
    layer = packed.get_submodule("layers.1.mlp.experts")
    held, exact = layer.method.dequantize(layer, "down_proj"), wanted["layers.1.mlp.experts.down_proj"]
    assert float((held - exact.view(held.shape)).norm() / exact.norm()) < 0.01
    more = config(Qwen3MoeConfig, **MIXTURE | {"num_experts": 4})
    with pytest.raises(ConfigError, match=r"ffn_gate_exps\.weight is of the shape \[3, 256, 256\], which has no expert 3"):
        loaded(more, path)


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    hf_config = config()

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        if "layers.1.mlp.up_proj" in name:
            return np.zeros((len(rows), 66), dtype=np.uint8), Type.IQ2_XXS
        return rows, Type.F32

    path = write_gguf(tmp_path / "m.gguf", "llama", tensors(hf_config), encode)
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_up\.weight in m\.gguf is stored as IQ2_XXS; what is read: .*Q6_K"):
        loaded(hf_config, path)


def test_errors_name_the_tensor_and_its_name_in_the_file(tmp_path: Path) -> None:
    hf_config = config()
    weights = tensors(hf_config)
    path = write_gguf(tmp_path / "a.gguf", "llama", weights, lambda name, rows: (rows, Type.F32))
    with pytest.raises(ConfigError, match=r"blk\.1\.attn_norm\.weight \(a\.gguf"):
        loaded(config(num_hidden_layers=1), path)
    with pytest.raises(ConfigError, match=r"q_proj\.weight \(a\.gguf as blk\.0\.attn_q\.weight\) has the shape \[256, 256\]"):
        loaded(config(num_attention_heads=8), path)
    del weights["model.norm.weight"]
    path = write_gguf(tmp_path / "b.gguf", "llama", weights, lambda name, rows: (rows, Type.F32))
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight"):
        loaded(hf_config, path)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.Q4_K], ids=lambda kind: kind.name)
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, kind: Type) -> None:
    """The first block's is NaN, as float16."""

    def encode(name: str, rows: np.ndarray) -> tuple[np.ndarray, Type]:
        blocks = random_blocks(kind, *rows.shape, seed=1)
        if "layers.1.mlp.down_proj" in name:
            blocks[0, :2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
        return blocks, kind

    path = write_gguf(tmp_path / "a.gguf", "llama", tensors(config()), encode)
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_down\.weight has scales that are NaN"):
        loaded(config(), path, "float32", "int4")


# The embedded model


@pytest.fixture(scope="module")
def embedded() -> Path:
    try:
        return find_model(EngineArgs()).weight_files[0]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_embedded_is_what_transformers_reads(embedded: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = find_model(EngineArgs())
    model = registry.build(registry.model_spec(found.config), "float32", "cpu")
    table = registry.name_table(model.spec)
    report = load_weights(model, table, found)
    theirs = AutoModelForCausalLM.from_pretrained(embedded.parent, gguf_file=embedded.name, dtype=torch.float32)
    state = theirs.state_dict()
    ours = dict(export(table, model))
    assert state.keys() - ours.keys() == {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, state[name]), name
    assert report.num_tensors == 272


def test_embedded_codes_lose_nothing(embedded: Path) -> None:
    """The integers that a packed product takes, against the floats, for every quantised matrix of the file."""
    found = find_model(EngineArgs())
    model_spec = registry.model_spec(found.config)
    checkpoint = GGUFCheckpoint(embedded, model_spec, registry.name_table(model_spec).all_names())
    count = 0
    for name, stored in checkpoint.tensors.items():
        codes = checkpoint.codes(name)
        assert (codes is None) == (stored.kind == "F32")
        if codes is not None and (count := count + 1) % 9 == 1:
            assert torch.equal(codes.dequantize(), checkpoint.read(name))
    assert count == 211


PAGE = """To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer The slings and arrows of
outrageous fortune, Or to take arms against a sea of troubles And by opposing end them. To die: to sleep; No more;
and by a sleep to say we end The heart-ache and the thousand natural shocks That flesh is heir to, 'tis a
consummation Devoutly to be wish'd. To die, to sleep; To sleep: perchance to dream: ay, there's the rub; For in that
sleep of death what dreams may come When we have shuffled off this mortal coil, Must give us pause: there's the
respect That makes calamity of so long life"""


@pytest.mark.slow
def test_how_much_text_rounding_costs(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nats of a token more than floats, in the number formats of GPUs. A model of 135 million weights feels each."""
    found = find_model(EngineArgs())
    tokens = load_tokenizer(found).encode(PAGE)
    monkeypatch.setattr(GGUFCheckpoint, "codes", lambda checkpoint, name: None)
    nats = {}
    for name in ("none", "int8", "fp8", "int4"):
        if name != "none":
            # A CPU runs the reference.
            monkeypatch.setitem(QUANTIZATIONS["cpu"], name, find(name, "cuda"))
        model = registry.build(registry.model_spec(found.config), "float32", "cpu", to_load=True)
        load_weights(model, registry.name_table(model.spec), found, device=torch.device("cpu"), quantization=name)
        bench = Bench(model)
        logits = bench.prefill(bench.sequence(tokens))
        nats[name] = float(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(tokens[1:])))
    for name, bound in (("int8", 0.05), ("fp8", 0.2), ("int4", 0.6)):
        assert abs(nats[name] - nats["none"]) < bound, nats
