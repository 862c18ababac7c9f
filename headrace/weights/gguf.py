"""Tensors of a GGUF file under Hugging Face's names and in Hugging Face's order of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    ReaderTensor,
)
from gguf.quants import dequantize

from headrace.errors import ConfigError
from headrace.layers.stored import Codes, QuantSpec
from headrace.model_spec import ModelSpec
from headrace.quant import gguf_blocks
from headrace.quant.formats.gguf import PLAIN_TYPES, SPECS
from headrace.sources.gguf import Metadata, forget, open_gguf
from headrace.weights.checkpoint import Checkpoint, StoredTensor
from headrace.weights.gguf_names import hf_names, hf_shape, hf_values

Type = GGMLQuantizationType
READABLE = frozenset(kind for kind in Type if kind.name in PLAIN_TYPES | SPECS.keys())
_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_IN_THE_CONFIG = frozenset({"rope_freqs.weight"})
"""Tensors whose content the configuration holds."""
_PERMUTED = frozenset({"llama", "granitehybrid"})
"""Architectures whose q and k rows GGUF stores for a rotary embedding of neighbouring channels."""
_QK = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_proj\.(?:weight|bias)")


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
        architecture = Metadata(file, reader).required("general.architecture", str)
        self._spec = spec
        self._architecture = architecture
        to_hf = hf_names(architecture, spec.num_layers, names, {tensor.name for tensor in reader.tensors})
        self._stored: dict[str, tuple[ReaderTensor, int | None]] = {}
        """Tensors of the file, and which expert's part."""
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in reader.tensors:
            if tensor.name in _IN_THE_CONFIG:
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
            return hf_values(self._architecture, name, self._order(name, values))
        if (codes := self.codes(name)) is not None:
            return codes.dequantize()
        floats = dequantize(self._blocks(name), kind)
        return torch.from_numpy(np.ascontiguousarray(floats, dtype=np.float32)).view(shape)

    def codes(self, name: str) -> Codes | None:
        if self.spec(name) is None:
            return None
        return gguf_blocks.decode(self._blocks(name), self._stored[name][0].tensor_type)

    def spec(self, name: str) -> QuantSpec | None:
        stored = self.tensors[name]
        return SPECS.get(stored.kind) if len(stored.shape) == 2 else None

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
        """q's and k's rows from channel pairs side by side to half a head apart; other tensors as they are."""
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
