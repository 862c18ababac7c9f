"""GGUF metadata becomes the config that the original model had."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.tiny_gguf import HIDDEN, VOCAB, write
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.sources import embedded
from headrace.sources.files import find_model
from headrace.sources.gguf import Reader, open_gguf, read_facts, read_metadata


def test_llama(tmp_path: Path) -> None:
    config = read_facts(write(tmp_path / "m.gguf", tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2)).config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, 128)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (16, 512)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.tie_word_embeddings is True
    assert config.attention_bias is config.mlp_bias is False
    assert str(config.dtype).endswith("float16")


@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_head_dim_untied_embeddings_and_defaults(tmp_path: Path, arch: str, name: str) -> None:
    output = {"output.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    fields = {"attention__key_length": 32, "attention__value_length": 32, "attention__head_count_kv": None}
    config = read_facts(write(tmp_path / "m.gguf", arch, tensors=output, **fields)).config
    assert config.architectures == [name]
    assert config.head_dim == 32
    assert config.tie_word_embeddings is False
    assert config.num_key_value_heads == 4


def test_a_mixture(tmp_path: Path) -> None:
    sizes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    config = read_facts(write(tmp_path / "m.gguf", "qwen3moe", **sizes)).config
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 32)
    assert config.norm_topk_prob is True


def test_biases_show_in_the_tensors(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.bias": np.zeros(64, np.float32), "blk.0.ffn_up.bias": np.zeros(128, np.float32)}
    config = read_facts(write(tmp_path / "m.gguf", tensors=tensors)).config
    assert config.attention_bias is config.mlp_bias is True


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = read_facts(write(tmp_path / "m.gguf", attention__sliding_window=128)).config
    assert config.architectures == ["MistralForCausalLM"]
    assert config.sliding_window == 128


def test_a_window_that_qwen_does_not_use_is_ignored_aloud(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path / "m.gguf", "qwen2", attention__sliding_window=128))
    assert facts.config.sliding_window is None
    assert [decision.name for decision in facts.decisions] == ["sliding_window"]


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    config = read_facts(write(tmp_path / "a.gguf", **linear)).config
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 256,
        "rope__scaling__attn_factor": 2.0,
    }
    rope = read_facts(write(tmp_path / "b.gguf", "qwen2", **yarn)).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 256)
    assert rope["attention_factor"] == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1.0))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_off_its_divisors(tmp_path: Path, factor: float) -> None:
    """Divisors as a converter computes them from transformers' own frequencies."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    size = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 131072}
    original = LlamaConfig(**size, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](original, device="cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    path = write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors}, attention__key_length=128, context_length=131072)
    config = read_facts(path).config
    assert config.rope_parameters == {**rope, "factor": pytest.approx(factor, rel=1e-6)}
    odd = divisors.copy()
    odd[40] *= 1.5
    path = write(tmp_path / "odd.gguf", tensors={"rope_freqs.weight": odd}, attention__key_length=128, context_length=131072)
    with pytest.raises(ConfigError, match="rope_freqs"):
        read_facts(path)


def test_end_of_sequence_and_sampling_defaults(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__eot_token_id": 5,
        "tokenizer__ggml__tokens": ["a", "<|im_end|>", "</s>", "<|eom_id|>", "<|im_end|>x"],
        "tokenizer__ggml__token_type": [1, 1, 3, 3, 3],
        "general__sampling__temp": 0.6,
        "general__sampling__top_k": 20,
    }
    found = read_facts(write(tmp_path / "m.gguf", **fields)).generation_config
    assert found == {"eos_token_id": [2, 5, 3], "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("gemma3", {}, "llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "layer to layer"),
        ("llama", {"attention__value_length": 8}, "value_length"),
        ("llama", {"rope__dimension_count": 8}, "dimension_count"),
        ("llama", {"rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"context_length": "long"}, "context_length"),
        ("llama", {"embedding_length": 32}, "embedding_length"),
        ("llama", {"attention__head_count": 0}, "head_count"),
        ("llama", {"attention__head_count": 5, "attention__head_count_kv": 5}, "LlamaForCausalLM"),
        ("llama", {"split__count": 3}, "3 parts"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, arch: str, fields: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", arch, **fields)
    with pytest.raises(ConfigError, match=message) as error:
        read_facts(path)
    assert error.value.param == "model"


def test_one_count_for_every_layer_may_be_a_list(tmp_path: Path) -> None:
    config = read_facts(write(tmp_path / "m.gguf", attention__head_count_kv=[2, 2])).config
    assert config.num_key_value_heads == 2


def test_a_file_without_embeddings(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        read_facts(tmp_path / "m.gguf")


def test_truncated_files_name_themselves(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", tokenizer__ggml__tokens=["a", "b"], tokenizer__ggml__scores=[0.5, 1.5]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, len(whole) - 64, 61), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf") as error:
            find_model(EngineArgs(model=str(cut)))
        assert error.value.param == "model"


def test_corrupt_files_fail_cleanly(tmp_path: Path) -> None:
    """Any byte of the description changed: it reads, or it is refused; nothing else."""
    whole = bytearray(write(tmp_path / "m.gguf", tokenizer__ggml__tokens=["a", "b"]).read_bytes())
    bad = tmp_path / "bad.gguf"
    for place in range(4, 700, 7):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        bad.write_bytes(changed)
        try:
            find_model(EngineArgs(model=str(bad)))
        except ConfigError:
            continue


def test_arrays_in_one_piece_read_as_the_packages_reader_reads_them(tmp_path: Path) -> None:
    fields = {
        "tokenizer__ggml__tokens": ["a", "", "Ġthe", "北"],
        "tokenizer__ggml__scores": [0.5, -1.0, 2.0, 3.0],
        "tokenizer__ggml__token_type": [1, 2, 3, 1],
    }
    path = write(tmp_path / "m.gguf", **fields)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert isinstance(ours, Reader)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
        assert ours.fields[name].types == field.types, name
    for our, their in zip(ours.tensors, theirs.tensors, strict=True):
        assert (our.name, our.data_offset) == (their.name, their.data_offset)
        assert np.array_equal(our.data, their.data)


def test_metadata_errors_name_file_and_field(tmp_path: Path) -> None:
    metadata = read_metadata(write(tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match=r"m\.gguf.*no\.such\.field"):
        metadata.required("no.such.field", int)
    assert metadata.get("no.such.field", int, 3) == 3
    with pytest.raises(ConfigError, match=r"m\.gguf: general\.architecture is 'llama': expected `float`, got `str`"):
        metadata.number("general.architecture", float)


def test_embedded_model() -> None:
    try:
        path = embedded.find()
    except ConfigError as error:
        pytest.skip(error.message)
    files = find_model(EngineArgs())
    assert (files.name, files.kind, files.weight_files) == ("SmolLM2-135M-Instruct", "gguf", [path])
    config = files.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100000
    assert config.tie_word_embeddings is True
    assert files.generation_config == {"eos_token_id": [2], "temperature": 0.2, "top_p": 0.9}
    assert [decision.name for decision in files.decisions] == ["model", "generation_config"]
