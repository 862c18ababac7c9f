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
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    ReaderTensor,
    get_tensor_name_map,
)
from gguf.quants import dequantize

from headrace.errors import ConfigError
from headrace.model_spec import ModelSpec
from headrace.quant import gguf_blocks
from headrace.quant.groups import GroupCodes
from headrace.sources.gguf import Metadata, forget, open_gguf
from headrace.weights.checkpoint import Checkpoint, StoredTensor

Type = GGMLQuantizationType
READABLE = frozenset(
    (Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K)
)
_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_IN_THE_CONFIG = frozenset({"rope_freqs.weight"})
"""Tensors whose content the configuration holds."""
_PERMUTED = frozenset({"llama"})
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
        self._permuted = architecture in _PERMUTED
        to_hf = _hf_names(architecture, spec.num_layers, names)
        self._stored: dict[str, ReaderTensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in reader.tensors:
            if tensor.name in _IN_THE_CONFIG:
                continue
            kind = tensor.tensor_type
            if kind not in READABLE:
                readable = ", ".join(sorted(kind.name for kind in READABLE))
                raise ConfigError(f"{tensor.name} in {file.name} is stored as {kind.name}; what is read: {readable}", "model")
            name = to_hf.get(tensor.name, tensor.name)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self._stored[name] = tensor
            self.tensors[name] = StoredTensor(shape, kind.name, int(tensor.n_bytes), f"{file.name} as {tensor.name}")

    def _whole(self, name: str) -> torch.Tensor:
        tensor, shape = self._stored[name], self.tensors[name].shape
        if tensor.tensor_type in _PLAIN:
            flat = np.array(tensor.data).reshape(-1).view(np.uint8)
            plain = torch.from_numpy(flat).view(_PLAIN[tensor.tensor_type])
            return self._order(name, plain.view(shape))
        if (codes := self.codes(name)) is not None:
            return codes.dequantize()
        values = dequantize(self._blocks(name), tensor.tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)

    def codes(self, name: str) -> GroupCodes | None:
        if self._stored[name].tensor_type in _PLAIN or len(self.tensors[name].shape) != 2:
            return None
        return gguf_blocks.decode(self._blocks(name), self._stored[name].tensor_type)

    def close(self) -> None:
        forget()

    def _blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """``[rows, bytes of a row]``. A row's blocks lie together, so rows can be put in order before they are decoded."""
        tensor = self._stored[name]
        values, size = GGML_QUANT_SIZES[tensor.tensor_type]
        row = self.tensors[name].shape[-1] // values * size
        blocks = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(-1, row))
        ordered: npt.NDArray[np.uint8] = self._order(name, blocks).numpy()
        return ordered

    def _order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """q's and k's rows from channel pairs side by side to half a head apart; other tensors as they are."""
        match = _QK.fullmatch(name)
        if match is None or not self._permuted:
            return rows
        layer = self._spec.layers[int(match[1])]
        heads = layer.num_heads if match[2] == "q" else layer.num_kv_heads
        if len(rows) % (2 * heads):
            # Of a wrong shape, which the loader says better.
            return rows
        pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _hf_names(architecture: str, num_layers: int, names: Iterable[str]) -> dict[str, str]:
    """GGUF's name -> Hugging Face's, for the names that the model has."""
    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(known[architecture], num_layers)
    pairs = ((table.get_name(name, try_suffixes=(".weight", ".bias")), name) for name in names)
    return {gguf_name: name for gguf_name, name in pairs if gguf_name is not None}
