"""Tensors of a GGUF file under Hugging Face's names and in Hugging Face's order of rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from headrace.errors import ConfigError
from headrace.layers.stored import Codes, QuantSpec
from headrace.model_spec import ModelSpec, StateSpec
from headrace.quant import gguf_blocks
from headrace.quant.formats.gguf import PLAIN_TYPES, SPECS
from headrace.quant.groups import GroupCodes
from headrace.sources.gguf import Metadata, forget, mtp_layers, open_gguf
from headrace.weights.checkpoint import Checkpoint, StoredTensor, check_scales
from headrace.weights.gguf_names import hf_names, hf_shape, hf_values

Type = GGMLQuantizationType
READABLE = frozenset(kind for kind in Type if kind.name in PLAIN_TYPES | SPECS.keys())
_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_IN_THE_CONFIG = frozenset({"rope_freqs.weight"})
"""Tensors whose content the configuration holds."""
_PERMUTED = frozenset({"llama", "granitehybrid", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose q and k rows GGUF stores for a rotary embedding of neighbouring channels."""
_QK = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mixer)\.([qk])_proj\.(?:weight|bias)")
_DEALT = frozenset({"qwen35", "qwen35moe"})
"""Architectures of whose value heads the first of all key heads come first, then the second of all, and so on."""
_DELTA = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(?!norm)(\w+)(?:\.weight)?")
_OF_BLOCK = re.compile(r"blk\.(\d+)\..*")


class GGUFCheckpoint(Checkpoint):
    """One GGUF file.

    Args:
        names: the checkpoint names that the model has, in Hugging Face's terms. What the file has beyond them keeps its
            own name.

    Raises:
        ConfigError: a tensor is of a type that is not read.
    """

    def __init__(self, file: Path, spec: ModelSpec, names: Iterable[str]) -> None:
        reader = open_gguf(file)
        metadata = Metadata(file, reader)
        architecture = metadata.required("general.architecture", str)
        unread = range(spec.num_layers, spec.num_layers + mtp_layers(metadata, architecture))
        self._spec = spec
        self._architecture = architecture
        to_hf = hf_names(architecture, spec.num_layers, names, {tensor.name for tensor in reader.tensors})
        self._stored: dict[str, tuple[ReaderTensor, int | None]] = {}
        """Tensors of the file, and which expert's part."""
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in reader.tensors:
            block = _OF_BLOCK.fullmatch(tensor.name)
            if tensor.name in _IN_THE_CONFIG or (block is not None and int(block[1]) in unread):
                continue
            kind = tensor.tensor_type
            if kind not in READABLE:
                readable = ", ".join(sorted(kind.name for kind in READABLE))
                raise ConfigError(f"{tensor.name} in {file.name} is stored as {kind.name}; what is read: {readable}", "model")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            source, parts = f"{file.name} as {tensor.name}", to_hf.get(tensor.name, {tensor.name: None})
            if None in parts.values():
                (name,) = parts
                self._stored[name] = tensor, None
                self.tensors[name] = StoredTensor(hf_shape(name, shape), kind.name, int(tensor.n_bytes), source)
                continue
            last = max(expert for expert in parts.values() if expert is not None)
            if len(shape) != 3 or shape[0] <= last:
                raise ConfigError(f"{source} is of the shape {list(shape)}, which has no expert {last}", "model")
            for name, expert in parts.items():
                self._stored[name] = tensor, expert
                self.tensors[name] = StoredTensor(shape[1:], kind.name, int(tensor.n_bytes) // shape[0], source)

    def _whole(self, name: str) -> torch.Tensor:
        kind, shape = self._stored[name][0].tensor_type, self.tensors[name].shape
        if kind in _PLAIN:
            values = torch.from_numpy(self._bytes(name)).view(_PLAIN[kind]).view(shape)
            return self._ordered_inputs(name, hf_values(self._architecture, name, self._order(name, values)))
        if (codes := self.codes(name)) is not None:
            return codes.dequantize()
        floats = dequantize(self._blocks(name), kind)
        return self._ordered_inputs(name, torch.from_numpy(np.ascontiguousarray(floats, dtype=np.float32)).view(shape))

    def codes(self, name: str) -> Codes | None:
        if self.spec(name) is None:
            return None
        stored = self._stored[name][0]
        codes = gguf_blocks.decode(self._blocks(name), stored.tensor_type)
        if codes is not None:
            check_scales(stored.name, codes.scales)
        if isinstance(codes, GroupCodes) and codes.offsets.is_floating_point():
            check_scales(stored.name, codes.offsets)
        if self._dealt_inputs(name) is None or not isinstance(codes, GroupCodes):
            return codes
        values, scales, offsets = (self._ordered_inputs(name, one) for one in (codes.codes, codes.scales, codes.offsets))
        return dataclasses.replace(codes, codes=values, scales=scales, offsets=offsets)

    def spec(self, name: str) -> QuantSpec | None:
        stored, state = self.tensors[name], self._dealt_inputs(name)
        spec = SPECS.get(stored.kind) if len(stored.shape) == 2 else None
        if spec is None or state is None:
            return spec
        # Inputs change places by whole groups.
        group = spec.group[1]
        return spec if spec.codes != "mxfp4" and isinstance(group, int) and state.value_dim % group == 0 else None

    def close(self) -> None:
        forget()

    def _blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """``[rows, bytes of a row]``. A row's blocks lie together, so rows can be put in order before they are decoded."""
        values, size = GGML_QUANT_SIZES[self._stored[name][0].tensor_type]
        row = self.tensors[name].shape[-1] // values * size
        blocks = torch.from_numpy(self._bytes(name).reshape(-1, row))
        ordered: npt.NDArray[np.uint8] = self._order(name, blocks).numpy()
        return ordered

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A copy of a tensor's bytes, of those of one expert where the file has all in one tensor."""
        tensor, expert = self._stored[name]
        data, size = tensor.data.reshape(-1).view(np.uint8), self.tensors[name].nbytes
        return np.array(data if expert is None else data[expert * size : (expert + 1) * size])

    def _order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """q's and k's rows from channel pairs side by side to half a head apart, and values by key head; other tensors as they
        are."""
        if (state := self._dealt(name)) is not None and state[1] != "out_proj":
            spec, part = state
            keys = 2 * spec.key_heads * spec.key_dim if part in ("in_proj_qkv", "conv1d") else 0
            return torch.cat((rows[:keys], _by_key_head(rows[keys:], spec)))
        match = _QK.fullmatch(name)
        if match is None or self._architecture not in _PERMUTED:
            return rows
        block = self._spec.blocks[int(match[1])]
        layer = self._spec.layers[block.attention or 0]
        heads = layer.num_heads if match[2] == "q" else layer.num_kv_heads
        if len(rows) % (2 * heads):
            # Of a wrong shape, which the loader says better.
            return rows
        pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _ordered_inputs(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """The inputs of what reads value heads, or numbers for groups of them, by key head; other tensors as they are."""
        spec = self._dealt_inputs(name)
        return matrix if spec is None else _by_key_head(matrix.t(), spec).t().contiguous()

    def _dealt_inputs(self, name: str) -> StateSpec | None:
        """The state layer whose value heads are a tensor's inputs, in another order; None: they are not."""
        state = self._dealt(name)
        return None if state is None or state[1] != "out_proj" else state[0]

    def _dealt(self, name: str) -> tuple[StateSpec, str] | None:
        """The state layer whose value heads lie in another order in a tensor, and the tensor's name there; None: none do."""
        match = _DELTA.fullmatch(name) if self._architecture in _DEALT else None
        block = None if match is None else self._spec.blocks[int(match[1])]
        return None if match is None or block is None or block.state is None else (self._spec.states[block.state], match[2])


def _by_key_head(rows: torch.Tensor, spec: StateSpec) -> torch.Tensor:
    """Sorts the rows of value heads, as many of each, by the key heads that they share."""
    if len(rows) % spec.heads:
        # Of a wrong shape, which the loader says better.
        return rows
    turns = rows.reshape(spec.heads // spec.key_heads, spec.key_heads, -1, *rows.shape[1:])
    return turns.transpose(0, 1).reshape(rows.shape)
