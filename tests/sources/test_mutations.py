"""Model files with any value in any field load, or are refused in one line that names file and field, before anything large
is allocated."""

from __future__ import annotations

import copy
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.implementation import choose
from headrace.resolve import DeviceFacts, resolve
from headrace.sources import gguf as gguf_source
from headrace.sources.files import find_model
from headrace.sources.megatron import check_arguments, find_megatron
from headrace.text.gguf_vocab import build_tokenizer
from headrace.weights.safetensors import SafetensorsCheckpoint

MACHINE = DeviceFacts(device="cpu", name="", instructions=frozenset(), num_cores=1, available_memory=2**30)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**40, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e300, -1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "5", "a\0b", "\ud800", "full_attention", [], [5], ["x"], [None], [[]], [1] * 1000, {}, {"a": 1}, {"type": []}),
]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "quantization_config": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
QWEN: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rope_scaling": YARN | {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "sliding_window": 16,
    "use_sliding_window": False,
}
WINDOWS: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
CAPPED: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "rope_scaling": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 16,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": None,
}
SYNONYMS = {
    "architectures": "architecture",
    "num_hidden_layers": "layer",
    "num_attention_heads": "heads",
    "num_key_value_heads": "heads",
    "num_experts": "experts",
    "num_experts_per_tok": "top_k",
    "use_sliding_window": "sliding_window",
    "head_count": "heads",
    "head_count_kv": "heads",
    "key_length": "head_dim",
}
"""Words by which an error may call a field that does not fit another one."""
CONFIGS = {"llama": LLAMA, "qwen3_moe": QWEN, "qwen3": WINDOWS}


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, each in inner for place in places(each, (*at, key)))]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = new
    return value


def loaded(folder: Path, **args: Any) -> None:
    """All that is decided before weights are read."""
    asked = EngineArgs(model=str(folder), load_format="dummy", model_impl="native", num_kv_blocks=8, **args)
    files = find_model(asked)
    spec = choose(asked, files).spec
    resolve(asked, files, spec, MACHINE)
    registry.name_table(spec)


def refused_by_name(load: Callable[[], None], file: Path, words: set[str]) -> None:
    """Checks that ``load`` works, or raises a ConfigError of one line with the file's name and one of the words, soon."""
    start = time.perf_counter()
    try:
        load()
    except ConfigError as error:
        assert "\n" not in error.message and len(error.message) < 1000
        said = f"{error.message} {error.param}".replace(" ", "_")
        assert any(each in said for word in words for each in (word, SYNONYMS.get(word, word))), error.message
        assert file.name in error.message, error.message
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("name", CONFIGS)
@QUICK
@given(data=st.data())
def test_any_value_in_any_field_of_a_config(name: str, tmp_path: Path, data: st.DataObject) -> None:
    config = CONFIGS[name]
    place, value = data.draw(st.sampled_from(places(config))), data.draw(st.sampled_from(VALUES))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed(config, place, value)))
    refused_by_name(lambda: loaded(tmp_path), file, {part for part in place if isinstance(part, str)})


@pytest.mark.parametrize("field", ["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"])
def test_any_divisor_of_logits(field: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for value in VALUES:
        for each in (value, [value], [value] * 2):
            file.write_text(json.dumps(CAPPED | {field: each}))
            refused_by_name(lambda: loaded(tmp_path), file, {field})


# GGUF

_TYPES = gguf.GGUFValueType
_SCALARS = {
    _TYPES.UINT8: "B",
    _TYPES.INT8: "b",
    _TYPES.UINT16: "H",
    _TYPES.INT16: "h",
    _TYPES.UINT32: "I",
    _TYPES.INT32: "i",
    _TYPES.UINT64: "Q",
    _TYPES.INT64: "q",
    _TYPES.FLOAT32: "f",
    _TYPES.FLOAT64: "d",
    _TYPES.BOOL: "?",
}
Field = tuple[gguf.GGUFValueType, Any]


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def encoded(kind: gguf.GGUFValueType, value: Any) -> bytes:
    """A value as GGUF stores it. Of an array: (type of the items, items); bytes stand for themselves, however wrong."""
    if isinstance(value, bytes):
        return value
    if kind == _TYPES.STRING:
        return string(value.encode())
    if kind == _TYPES.ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(encoded(item, each) for each in items)
    return struct.pack("<" + _SCALARS[kind], value)


def number(value: int) -> Field:
    return _TYPES.UINT32, value


def words(*values: str) -> Field:
    return _TYPES.ARRAY, (_TYPES.STRING, values)


TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
FIELDS: dict[str, Field] = {
    "general.architecture": (_TYPES.STRING, "llama"),
    "general.sampling.temp": (_TYPES.FLOAT32, 0.5),
    "general.sampling.top_k": number(3),
    "llama.block_count": number(2),
    "llama.context_length": number(128),
    "llama.embedding_length": number(32),
    "llama.feed_forward_length": number(48),
    "llama.attention.head_count": number(4),
    "llama.attention.head_count_kv": number(2),
    "llama.attention.key_length": number(8),
    "llama.attention.layer_norm_rms_epsilon": (_TYPES.FLOAT32, 1e-5),
    "llama.rope.freq_base": (_TYPES.FLOAT32, 10000.0),
    "llama.rope.scaling.type": (_TYPES.STRING, "yarn"),
    "llama.rope.scaling.factor": (_TYPES.FLOAT32, 4.0),
    "llama.rope.scaling.original_context_length": number(32),
    "llama.rope.scaling.attn_factor": (_TYPES.FLOAT32, 1.0),
    "tokenizer.ggml.model": (_TYPES.STRING, "gpt2"),
    "tokenizer.ggml.pre": (_TYPES.STRING, "gpt-2"),
    "tokenizer.ggml.tokens": words(*TOKENS),
    "tokenizer.ggml.token_type": (_TYPES.ARRAY, (_TYPES.INT32, [2, 3, 3, 1, 1, 1])),
    "tokenizer.ggml.merges": words("a b"),
    "tokenizer.ggml.eos_token_id": number(2),
    "tokenizer.ggml.bos_token_id": number(1),
    "tokenizer.ggml.add_bos_token": (_TYPES.BOOL, True),
    "tokenizer.chat_template": (_TYPES.STRING, "{{ messages }}"),
}
_HUGE = struct.pack("<Q", 2**60)
OTHERS: list[Field] = [
    *(
        (kind, value)
        for kind, code in _SCALARS.items()
        for value in (0, 1, *([2 ** (8 * struct.calcsize(code)) - 1] * code.isupper()))
    ),
    *((_TYPES.INT64, value) for value in (-1, -(2**63))),
    *((_TYPES.FLOAT64, value) for value in (-1.0, 1e-320, 1e300, float("inf"), float("nan"))),
    *((_TYPES.STRING, text) for text in ("", "x", "none", "linear")),
    (_TYPES.STRING, string(b"\xff\xfe")),
    (_TYPES.STRING, _HUGE),
    *((_TYPES.ARRAY, (kind, [1] * count)) for kind in _SCALARS for count in (0, 1, 6)),
    words(),
    words("x"),
    words(*("",) * 6),
    (_TYPES.ARRAY, (_TYPES.STRING, [string(b"\xff")])),
    (_TYPES.ARRAY, (_TYPES.ARRAY, [(_TYPES.UINT32, [1])])),
    *((_TYPES.ARRAY, struct.pack("<I", kind) + _HUGE) for kind in (*_SCALARS, _TYPES.STRING, _TYPES.ARRAY)),
    (_TYPES.ARRAY, struct.pack("<IQ", _TYPES.ARRAY, 1) * 5000),
    (_TYPES.ARRAY, struct.pack("<IQ", 99, 1)),
]
SHAPES: list[Any] = [
    *((0, 64), (32, 0), (0, 0), (32,), (32, 64, 1), (), (2**32, 2**32), (2**63, 2), (1, 1), (2**20 + 1, 1)),
    *((32, 2**31), (1,) * 100),
]


def gguf_bytes(fields: dict[str, Field], shape: tuple[int, ...] = (32, 64), twice: str = "") -> bytes:
    entries = [*fields.items(), *([(twice, fields[twice])] if twice else [])]
    out = [b"GGUF", struct.pack("<IQQ", 3, 1, len(entries))]
    out += [string(key.encode()) + struct.pack("<I", kind) + encoded(kind, value) for key, (kind, value) in entries]
    out.append(string(b"token_embd.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape))
    out.append(struct.pack("<IQ", gguf.GGMLQuantizationType.F32, 0))
    head = b"".join(out)
    return head + bytes(-len(head) % 32) + bytes(32 * 64 * 4)


def loaded_gguf(file: Path) -> None:
    gguf_source.forget()
    loaded(file)
    build_tokenizer(gguf_source.read_metadata(file))


@QUICK
@given(key=st.sampled_from(sorted(FIELDS)), field=st.sampled_from(OTHERS))
def test_any_value_in_any_field_of_a_gguf_file(tmp_path: Path, key: str, field: Field) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(FIELDS))
    loaded_gguf(file)
    file.write_bytes(gguf_bytes(FIELDS | {key: field}))
    refused_by_name(lambda: loaded_gguf(file), file, {key, *key.rsplit(".", 1)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_of_a_gguf_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(FIELDS, shape))
    refused_by_name(lambda: loaded_gguf(file), file, {"token_embd.weight", "context_length", "embedding_length"})


def test_a_gguf_field_that_is_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(FIELDS, twice="llama.block_count"))
    with pytest.raises(ConfigError, match=r"m\.gguf .*llama\.block_count"):
        loaded_gguf(file)


@QUICK
@given(data=st.data())
def test_any_byte_of_a_gguf_header(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(gguf_bytes(FIELDS))
    end = len(whole) - 32 * 64 * 4
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(4, end))]
    else:
        for place in data.draw(st.lists(st.integers(4, end - 1), min_size=1, max_size=3)):
            whole[place] = data.draw(st.integers(0, 255))
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    refused_by_name(lambda: loaded_gguf(file), file, {"m.gguf"})


# safetensors

HEADERS: list[Any] = [
    *VALUES,
    *({"w": value} for value in VALUES),
    *({"w": {"dtype": value, "shape": [2], "data_offsets": [0, 8]}} for value in (*VALUES, "F64", "I64", "U8", "C64", "F4")),
    *({"w": {"dtype": "F32", "shape": value, "data_offsets": [0, 8]}} for value in (*VALUES, [2**63, 0], [0, 2**63], [-1])),
    *({"w": {"dtype": "F32", "shape": [2], "data_offsets": value}} for value in (*VALUES, [8, 0], [0, 2**60], [0, 4])),
    {
        "w": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]},
        "v": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
    },
]


@pytest.mark.parametrize("length", [None, 0, 7, 2**40, 2**63])
def test_any_header_of_a_safetensors_file(tmp_path: Path, length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "model.safetensors"
    for header in HEADERS if length is None else HEADERS[-1:]:
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(8))

        def load() -> None:
            checkpoint = SafetensorsCheckpoint(find_model(EngineArgs(model=str(tmp_path))).weight_files)
            for name, stored in checkpoint.tensors.items():
                assert checkpoint.read(name).shape == stored.shape
            checkpoint.close()

        refused_by_name(load, file, {"model.safetensors"})


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json"])
def test_any_value_in_the_other_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    plain = {"eos_token_id": [2], "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0}
    plain = plain if name.startswith("generation") else {"weight_map": {"w": "model.safetensors"}}
    for place in places(plain):
        for value in VALUES:
            (tmp_path / name).write_text(json.dumps(changed(plain, place, value)))
            refused_by_name(
                lambda: find_model(EngineArgs(model=str(tmp_path))) and None, tmp_path / name, {str(place[0]), "weights"}
            )


def test_any_value_in_the_files_of_a_megatron_checkpoint(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    arguments |= dict.fromkeys(("ffn_hidden_size", "kv_channels", "num_query_groups", "num_experts", "q_lora_rank"))
    check_arguments(arguments, tmp_path / "common.pt")
    for name in arguments:
        for value in VALUES:
            changes = arguments | {name: value}
            refused_by_name(lambda changes=changes: check_arguments(changes, tmp_path / "common.pt"), Path("common.pt"), {name})
    for place in (("sharded_backend",), ("common_backend",)):
        for value in VALUES:
            (tmp_path / "metadata.json").write_text(json.dumps(changed({"sharded_backend": "torch_dist"}, place, value)))
            refused_by_name(lambda: find_megatron(tmp_path) and None, tmp_path, {place[0], "stored_as", ".metadata"})
    (tmp_path / "metadata.json").unlink()
    for text in (b"", b"\xff", b"9" * 5000, "\N{SUPERSCRIPT TWO}".encode(), b"../x", b"1\n2"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
        refused_by_name(lambda: find_megatron(tmp_path) and None, tmp_path, {"iteration"})


@pytest.mark.parametrize(
    "text",
    [
        *(opening * 100_000 for opening in ("[", '{"a":')),
        '{"a":' * 500 + "1" + "}" * 500,
        '{"model_type": "llama", "model_type": "qwen2"}',
        '{"num_hidden_layers": 1' + "0" * 5000 + "}",
        '\udcff{"',
        "\ufeff[]",
    ],
    ids=lambda text: text[:12],
)
def test_json_that_is_none_of_a_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        loaded(tmp_path)
    assert len(error.value.message) < 1000


def test_layers_that_no_model_has_are_refused_at_once(tmp_path: Path) -> None:
    for config in (LLAMA, WINDOWS, {"text_config": LLAMA}, LLAMA | {"model_type": "gpt_neox"}):
        place = ("text_config", "num_hidden_layers") if "text_config" in config else ("num_hidden_layers",)
        (tmp_path / "config.json").write_text(json.dumps(changed(config, place, 10**9)))
        start = time.perf_counter()
        with pytest.raises(ConfigError, match=r"config\.json.*num_hidden_layers"):
            loaded(tmp_path)
        assert time.perf_counter() - start < 5
