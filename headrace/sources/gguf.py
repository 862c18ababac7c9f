"""GGUF files: reads the metadata and converts it to a transformers config."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, TokenType

from headrace.config import Decision
from headrace.errors import ConfigError
from headrace.options import shown
from headrace.sources.fields import (
    Epsilon,
    Experts,
    Factor,
    Layers,
    Length,
    Positions,
    Size,
    Theta,
    TokenId,
    Vocabulary,
    Width,
    sampling_default,
    typed,
)
from headrace.sources.gguf_hybrid import HYBRIDS, PARTLY_ROTATED, common_size, hybrid_facts, qwen_mixture
from headrace.sources.plain_config import plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    **dict(HYBRIDS.values()),
}
"""Model type in transformers -> architecture."""
_MIXTURES = {"qwen3moe": "qwen3_moe"}
"""Architectures of mixtures -> model type."""
_KINDS = _MIXTURES | {arch: kind for arch, (kind, _) in HYBRIDS.items()}
"""``general.architecture`` -> model type, of mixtures and hybrids."""
_KNOWN = ("llama", "qwen2", "qwen3", *_KINDS)
"""Supported values of ``general.architecture``."""
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_SAMPLING_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_NAME_LENGTH = 256
"""Bytes of a name that an error quotes at most."""
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})
"""Control tokens that end a turn in every model that has them. Files often name only the end-of-text token."""


@dataclasses.dataclass(frozen=True)
class GGUFFacts:
    """Config, generation config and decisions from a file's metadata."""

    config: PreTrainedConfig
    generation_config: dict[str, Any]
    decisions: tuple[Decision, ...]


class Reader(GGUFReader):
    """The gguf package's reader, but reads each array at once: the package takes seconds for a large vocabulary."""

    def __init__(self, path: Path) -> None:
        self._name = b""
        """The string that was read last: the name of the field or tensor at hand, or a field's value."""
        try:
            super().__init__(path)
        except (ValueError, KeyError, IndexError, OverflowError, struct.error, TypeError, RecursionError) as error:
            raise ValueError(f"at {shown(self._name.decode('utf-8', 'replace'))}: {error}") from error

    def _get_str(self, offset: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        length, data = super()._get_str(offset)
        if len(data) != int(length[0]):
            raise ValueError("the file ends inside a string")
        self._name = bytes(data[:_NAME_LENGTH])
        return length, data

    @functools.cached_property
    def decoded(self) -> dict[str, Any]:
        """Key -> value, for the fields decoded so far."""
        return {}

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        types = [GGUFValueType.ARRAY, item_type] if length else [GGUFValueType.ARRAY]
        if item_type == GGUFValueType.STRING:
            parts, end = self._strings(start, length)
            return end - orig_offs, parts, list(range(length)), types
        numbers = self.gguf_scalar_to_np.get(item_type)
        if numbers is None:
            raise ValueError("arrays of arrays are not read")
        values = self._get(start, numbers, length)
        if len(values) != length:
            raise ValueError("the file ends inside an array")
        return 12 + int(values.nbytes), [values], [0] if length else [], types

    def _strings(self, start: int, length: int) -> tuple[list[memoryview], int]:
        """Returns the bytes of ``length`` strings from offset ``start``, and the offset after them."""
        view, total, parts = self.data.data, len(self.data), []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(length):
            begin = start + 8
            start = begin + size_of(view, start)[0]
            if start > total:
                raise ValueError("the file ends inside an array")
            parts.append(view[begin:start])
        return parts, start


def open_gguf(path: Path) -> Reader:
    """Opens a GGUF file: fields, and tensors as memory maps. The last file stays open until ``forget``.

    Raises:
        ConfigError: the file is truncated or corrupt, or one part of a split file.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}", "model") from error
    return _open(path, stat.st_mtime_ns, stat.st_size)


def forget() -> None:
    """Closes the file that was opened last."""
    _open.cache_clear()


@functools.lru_cache(maxsize=1)
def _open(path: Path, changed: int, size: int) -> Reader:
    try:
        reader = Reader(path)
        parts = Metadata(path, reader).integer("split.count", Width, 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is truncated or corrupt, it cannot be read as GGUF: {error}", "model") from error
    if parts > 1:
        raise ConfigError(
            f"{path} is one of {parts} parts, and only whole files are read; join them with: "
            "llama-gguf-split --merge <first part> <whole file>",
            "model",
        )
    return reader


class Metadata:
    """The fields of an open file, decoded on demand. Errors name the file and the field."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path = path
        self._reader = reader

    def __contains__(self, key: object) -> bool:
        return key in self._reader.fields

    def required(self, key: str, kind: Any) -> Any:
        """Returns a field's value, of the type ``kind``."""
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"{self.path} has no field {key}", "model")
        try:
            if key not in self._reader.decoded:
                self._reader.decoded[key] = field.contents()
        except (ValueError, IndexError, TypeError) as error:
            raise ConfigError(f"{self.path}: the field {key} is corrupt: {error}", "model") from error
        return typed(self._reader.decoded[key], kind, self.path, key)

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """Returns the field like ``required``, or the default where the file lacks it."""
        return self.required(key, kind) if key in self else default

    def integer(self, key: str, kind: Any, default: int | None = None) -> int:
        """Returns an integer of the type ``kind``; a list counts if all its entries are equal."""
        if default is not None and key not in self:
            return default
        value = self.required(key, kind | list[kind])
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigError(f"{self.path}: {key} differs from layer to layer, which is not supported: {value}", "model")
            value = value[0]
        return int(value)

    def number(self, key: str, kind: Any, default: float | None = None) -> float:
        """Returns a number as the shortest decimal of the same float32 value (1e-05, not 9.99e-06)."""
        if default is not None and key not in self:
            return default
        return float(str(np.float32(self.required(key, kind))))


def read_metadata(path: Path) -> Metadata:
    """The metadata of a GGUF file."""
    return Metadata(path, open_gguf(path))


def read_facts(path: Path) -> GGUFFacts:
    """Reads config, end-of-sequence ids and sampling defaults of a GGUF file.

    Raises:
        ConfigError: the file is corrupt, or its architecture is not supported.
    """
    reader = open_gguf(path)
    metadata = Metadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = metadata.required("general.architecture", str)
    if architecture not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise ConfigError(f"{path} holds the architecture {architecture!r}; known are: {known}", "model")
    decisions: list[Decision] = []
    config = _config(metadata, tensors, architecture, decisions)
    generation: dict[str, Any] = {"eos_token_id": eos_token_ids(metadata)}
    for key, name in _SAMPLING_DEFAULTS.items():
        if key in metadata:
            value = metadata.integer(key, int) if name == "top_k" else metadata.number(key, float)
            generation[name] = sampling_default(name, value, path, key)
    return GGUFFacts(config, generation, tuple(decisions))


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Tokens that end an answer: those the file names, then control tokens whose name ends a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [metadata.integer(key, TokenId) for key in keys if key in metadata]
    types = metadata.get("tokenizer.ggml.token_type", list[int], [])
    names = metadata.get("tokenizer.ggml.tokens", list[str], [])
    ids += [i for i, kind in enumerate(types) if kind == TokenType.CONTROL and i < len(names) and names[i] in _END_OF_TURN]
    return list(dict.fromkeys(ids))


def _config(metadata: Metadata, tensors: Mapping[str, Any], arch: str, decisions: list[Decision]) -> PreTrainedConfig:
    kind = _KINDS.get(arch, arch)
    if arch not in _KINDS and metadata.get(f"{arch}.expert_count", Experts, 0):
        raise ConfigError(f"{metadata.path} is a mixture of experts, which is not supported", "model")
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{metadata.path} has no tensor token_embd.weight", "model")
    shape = tensors["token_embd.weight"].shape.tolist()
    hidden, vocab = typed(shape, tuple[Size, Vocabulary], metadata.path, "the shape of token_embd.weight")
    heads = metadata.integer(f"{arch}.attention.head_count", Size)
    head_dim = metadata.integer(f"{arch}.attention.key_length", Size, hidden // heads)
    facts: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(metadata, arch),
        "num_hidden_layers": metadata.integer(f"{arch}.block_count", Layers) - mtp_layers(metadata, arch),
        "num_attention_heads": heads,
        "num_key_value_heads": common_size(metadata, f"{arch}.attention.head_count_kv", heads)
        if arch in HYBRIDS
        else metadata.integer(f"{arch}.attention.head_count_kv", Size, heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{arch}.context_length", Positions),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon", Epsilon),
        "rope_parameters": _rope(metadata, tensors, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", TokenId),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id", TokenId),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", TokenId),
        "dtype": _dtype(tensors),
    }
    widths = [f"{arch}.attention.value_length"]
    if arch not in PARTLY_ROTATED:
        widths.append(f"{arch}.rope.dimension_count")
    for key in widths:
        if (width := metadata.integer(key, Size, head_dim)) != head_dim:
            raise ConfigError(f"{metadata.path}: {key} is {width}, but a head is {head_dim} wide", "model")
    if metadata.integer(f"{arch}.embedding_length", Size, hidden) != hidden:
        raise ConfigError(f"{metadata.path}: {arch}.embedding_length is not token_embd.weight's width {hidden}", "model")
    window = metadata.integer(f"{arch}.attention.sliding_window", Length, 0)
    if arch == "llama" and window:
        kind = "mistral"
        facts["sliding_window"] = window
    elif arch == "llama":
        facts["attention_bias"] = "blk.0.attn_q.bias" in tensors
        facts["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    elif window:
        reason = f"{arch} models use a window only if the config enables it, and GGUF does not store that"
        decisions.append(Decision("sliding_window", f"ignored ({window})", reason))
    if arch in ("qwen3", *_MIXTURES):
        facts["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch in _MIXTURES:
        facts |= qwen_mixture(metadata, arch)
    if arch in HYBRIDS:
        facts |= hybrid_facts(metadata, tensors, arch, facts)
    architecture = _ARCHITECTURES[kind]
    plain = plain_config({"model_type": kind, "architectures": [architecture], **facts})
    if plain is not None:
        return cast("PreTrainedConfig", plain)
    from transformers import AutoConfig

    try:
        found: PreTrainedConfig = AutoConfig.for_model(kind, architectures=[architecture], **facts)
        return found
    except Exception as error:
        # The config classes raise errors of several libraries.
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{metadata.path} does not describe a {architecture}: {why}", "model") from error


def mtp_layers(metadata: Metadata, arch: str) -> int:
    """The layers for multi-token prediction, which ``block_count`` includes: the last ones."""
    return metadata.integer(f"{arch}.nextn_predict_layers", Width, 0)


def _intermediate_size(metadata: Metadata, arch: str) -> int:
    key = f"{arch}.feed_forward_length"
    if arch not in HYBRIDS:
        return metadata.integer(key, Size)
    if key not in metadata:
        # Of a mixture without dense MLPs.
        return metadata.integer(f"{arch}.expert_feed_forward_length", Size)
    return common_size(metadata, key, 0)


def _rope(metadata: Metadata, tensors: Mapping[str, Any], arch: str, head_dim: int) -> dict[str, Any]:
    """Rotary embedding under transformers' names."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number(f"{arch}.rope.freq_base", Theta, 10000.0)}
    if "rope_freqs.weight" in tensors:
        factors = np.asarray(tensors["rope_freqs.weight"].data, dtype=np.float64).ravel()
        return rope | _llama3_scaling(metadata.path, factors, rope["rope_theta"], head_dim)
    scaling = f"{arch}.rope.scaling."
    kind = metadata.get(scaling + "type", str, "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{metadata.path}: {scaling}type {kind!r} is not supported; linear and yarn are", "model")
    rope |= {"rope_type": kind, "factor": metadata.number(scaling + "factor", Factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = metadata.integer(scaling + "original_context_length", Positions)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if scaling + key in metadata:
                rope[name] = metadata.number(scaling + key, Factor)
        if scaling + "attn_factor" in metadata:
            # llama.cpp multiplies YaRN's default factor by this one; transformers takes the product.
            default = 0.1 * math.log(rope["factor"]) + 1.0
            rope["attention_factor"] = default * metadata.number(scaling + "attn_factor", Factor)
    return rope


def _llama3_scaling(path: Path, factors: np.ndarray[Any, Any], theta: float, head_dim: int) -> dict[str, Any]:
    """Recognises Llama 3's scaling by the frequency divisors, which is all that GGUF stores of it.

    Its constants are the same in every Llama 3.x; only ``factor`` differs (8 or 32).
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(str(np.float32(typed(float(factors.max(initial=0.0)), Factor, path, "rope_freqs.weight"))))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(f"{path}: rope_freqs.weight is not Llama 3's rope scaling, the only one known of its kind", "model")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the largest matrix; bfloat16 for quantised ones, whose steps are coarser than bfloat16's."""
    largest = max(tensors.values(), key=lambda tensor: int(tensor.n_elements))
    return _PLAIN_DTYPES.get(largest.tensor_type, "bfloat16")
