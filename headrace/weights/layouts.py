"""Layouts of quantised matrices in a checkpoint: their tensors, the shapes of these, and the codes that they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch

from headrace.errors import ConfigError
from headrace.layers.stored import Codes, QuantSpec
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.formats.scheme import Rule
from headrace.quant.groups import GroupCodes
from headrace.quant.words import AWQ_ORDER, unpack
from headrace.weights.checkpoint import StoredTensor

LEAVES = frozenset(
    {
        *("weight", "weight_scale", "weight_scale_inv", "weight_zero_point"),
        *("weight_packed", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_scale_2"),
        *("qweight", "qzeros", "scales", "g_idx"),
        *("input_scale", "activation_scale", "input_zero_point", "input_global_scale"),
    }
)
"""Last components of the names of tensors that are parts of a quantised matrix."""
INPUT_SCALES = ("input_scale", "activation_scale")
SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2", "scales")
"""Leaves that are scales of inputs, and leaves that are scales of weights."""
FLOATS = ("F32", "F16", "BF16")
Along = tuple[tuple[int, int] | None, ...]
"""For each axis of the matrix: the axis of the stored tensor, and how many numbers of the matrix share one of its indices.
None: every range of the matrix needs all of it."""
Tensors = Mapping[str, torch.Tensor]
"""Tensors by the last component of their names."""


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """One stored tensor of a quantised matrix."""

    shape: tuple[int, ...]
    """The stored shape may differ by axes of length 1."""
    along: Along


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """A quantised matrix, or a stack of them, before it is read."""

    shape: tuple[int, ...]
    """``[..., N, K]``"""
    kind: str
    spec: QuantSpec
    pieces: Mapping[str, StoredPiece]
    """Stored tensors by the last component of their names."""
    decode: Callable[[Tensors, tuple[int, ...], int], Codes]
    """Makes codes of the pieces for a range of the matrix, from the range's shape and its first input."""


class MatrixTensors:
    """The stored tensors of one quantised matrix, as a layout claims them one by one.

    Args:
        module: the matrix's name.
        rule: the rule that decided its format.
        tensors: (name, tensor) by the last component of the name.
        name_of: gives the name of a tensor that is missing.
        read: reads a stored tensor by its full name.
    """

    def __init__(
        self,
        module: str,
        rule: Rule,
        spec: QuantSpec,
        tensors: Mapping[str, tuple[str, StoredTensor]],
        name_of: Callable[[str], str],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self.module, self.rule, self.spec = module, rule, spec
        self.pieces: dict[str, StoredPiece] = {}
        self._tensors = tensors
        self._name_of = name_of
        self._read = read
        self._claimed: set[str] = set()

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._tensors

    def first_of(self, *leaves: str) -> str:
        """The one of several alternative names that is there, or the first."""
        return next((leaf for leaf in leaves if leaf in self), leaves[0])

    def tensor(self, leaf: str) -> StoredTensor:
        if leaf not in self._tensors:
            raise ConfigError(f"{self._name_of(leaf)} is missing: {self.means()}", "model")
        return self._tensors[leaf][1]

    def means(self) -> str:
        return f"{self.rule} means {self.module} as {self.spec}"

    def claim(self, leaf: str, kinds: Sequence[str], shape: tuple[int, ...], along: Along) -> None:
        """Takes a tensor as a part of the matrix. Raises ConfigError if it is missing, or of another type or shape."""
        tensor = self.tensor(leaf)
        if tensor.kind not in kinds:
            raise self.error(leaf, f"is stored as {tensor.kind}, not as {' or '.join(kinds)}")
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise self.error(leaf, f"is of the shape {list(tensor.shape)}, not {list(shape)}")
        self._claimed.add(leaf)
        self.pieces[leaf] = StoredPiece(shape, along)

    def pass_over(self, *leaves: str) -> None:
        """Takes tensors that floats do not need."""
        self._claimed |= {leaf for leaf in leaves if leaf in self}

    def values(self, leaf: str) -> list[int]:
        """The integers of a small tensor."""
        self._claimed.add(leaf)
        self.tensor(leaf)
        return [int(value) for value in self._read(self._tensors[leaf][0]).flatten()]

    def error(self, leaf: str, what: str) -> ConfigError:
        return ConfigError(f"{self._tensors[leaf][0]} {what}: {self.means()}", "model")

    def finish(
        self, shape: tuple[int, ...], kind: str, decode: Callable[[Tensors, tuple[int, ...], int], Codes]
    ) -> MatrixLayout:
        """Raises ConfigError if a tensor was not claimed."""
        self.pass_over(*INPUT_SCALES, "input_zero_point", "input_global_scale")
        if left := sorted(self._tensors.keys() - self._claimed):
            raise self.error(left[0], "is no part of the matrix")
        return MatrixLayout(shape, kind, self.spec, self.pieces, decode)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _ceil(size: int, each: int) -> int:
    return -(-size // each)


def _matrix(parts: MatrixTensors, leaf: str) -> tuple[int, ...]:
    """The shape of a tensor that must have two axes at least."""
    shape = parts.tensor(leaf).shape
    if len(shape) < 2:
        raise parts.error(leaf, f"is of the shape {list(shape)}, which is no matrix")
    return shape


# Codes that have a tensor element each


def scaled(parts: MatrixTensors) -> MatrixLayout:
    """``weight`` as it is, with ``weight_scale`` or ``weight_scale_inv`` (both are factors)."""
    shape = _matrix(parts, "weight")
    *stack, outputs, inputs = shape
    whole = tuple((axis, 1) for axis in range(len(shape)))
    parts.claim("weight", ("F8_E4M3",) if parts.spec.codes == "e4m3" else ("I8",), shape, whole)
    leaf = parts.first_of("weight_scale_inv", "weight_scale")
    tile = parts.spec.group
    if isinstance(tile, str):
        # Writers differ in how exactly they name these two; the shape cannot be mistaken.
        stored = math.prod(parts.tensor(leaf).shape)
        name: Literal["tensor", "channel"] = "tensor" if stored == math.prod(stack) else "channel"
        parts.spec = dataclasses.replace(parts.spec, group=name)
        tile = (outputs if name == "tensor" else 1, inputs)
    if parts.tensor(leaf).kind == "F8_E8M0":
        parts.spec = dataclasses.replace(parts.spec, scale="e8m0")
    grid = (*stack, _ceil(outputs, tile[0]), _ceil(inputs, tile[1]))
    along = (*whole[:-2], *((len(stack) + axis, tile[axis]) if grid[axis - 2] > 1 else None for axis in (0, 1)))
    parts.claim(leaf, (*FLOATS, "F8_E8M0"), grid, along)
    if "weight_zero_point" in parts or parts.spec.zero == "int":
        parts.claim("weight_zero_point", ("I8", *FLOATS, "F8_E4M3"), grid, along)
    if parts.spec.codes == "e4m3":
        return parts.finish(shape, "F8_E4M3", partial(_tiles, parts, leaf, tile))
    if stack or tile[0] not in (1, outputs):
        raise parts.error("weight", f"is of the shape {list(shape)}: integers with tiles, and stacks of them, are not read")
    return parts.finish(shape, "I8", partial(_bytes, _bits(parts.spec), leaf, tile[1]))


def _tiles(
    parts: MatrixTensors, leaf: str, tile: tuple[int, int], tensors: Tensors, shape: tuple[int, ...], first: int
) -> TileCodes:
    if "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].float().any()):
        raise parts.error("weight_zero_point", "is not zero, and e4m3 has no zero points")
    return TileCodes(tensors["weight"], tensors[leaf], tile)


def _bytes(bits: int, leaf: str, group: int, tensors: Tensors, shape: tuple[int, ...], first: int) -> GroupCodes:
    # Codes of 4 bits have a byte each too.
    codes, scales = tensors["weight"].view(torch.uint8) + 2 ** (bits - 1), tensors[leaf].expand(shape[0], -1)
    return GroupCodes(bits, codes, scales, _zeros(tensors.get("weight_zero_point"), bits, scales), group)


def _zeros(signed: torch.Tensor | None, bits: int, scales: torch.Tensor) -> torch.Tensor:
    """``[N, G]`` uint8, of the zero points of signed codes; None: symmetric ones."""
    middle = 2 ** (bits - 1)
    if signed is None:
        return torch.full((1, 1), middle, dtype=torch.uint8, device=scales.device).expand(scales.shape)
    unsigned: torch.Tensor = (signed.to(torch.int16) + middle).to(torch.uint8)
    return unsigned.expand(scales.shape)


# Codes in words of 32 bits


def packed(parts: MatrixTensors) -> MatrixLayout:
    """compressed-tensors' ``weight_packed``: along the inputs, but zero points along the outputs."""
    bits, (rows, words) = _bits(parts.spec), _matrix(parts, "weight_packed")[-2:]
    per = 32 // bits
    shape = tuple(parts.values("weight_shape"))
    if len(shape) != 2 or shape[0] != rows or _ceil(shape[1], per) != words:
        raise parts.error("weight_shape", f"is {list(shape)}, and weight_packed {list(parts.tensor('weight_packed').shape)}")
    parts.claim("weight_packed", ("I32",), (rows, words), ((0, 1), (1, per)))
    group, count, inputs = _groups(parts, "weight_g_idx", shape[1], 1)
    one = parts.spec.group == "tensor"
    parts.claim("weight_scale", FLOATS, (1 if one else rows, count), (None if one else (0, 1), inputs))
    if "weight_zero_point" in parts or parts.spec.zero == "int":
        if parts.tensor("weight_zero_point").kind == "I32":
            parts.claim("weight_zero_point", ("I32",), (_ceil(rows, per), count), ((0, per), inputs))
        else:
            parts.claim("weight_zero_point", ("I8",), (1 if one else rows, count), (None if one else (0, 1), inputs))
    return parts.finish(shape, f"packed {parts.spec.codes}", partial(_packed, parts, bits, group))


def _packed(parts: MatrixTensors, bits: int, group: int, tensors: Tensors, shape: tuple[int, ...], first: int) -> GroupCodes:
    codes = unpack(tensors["weight_packed"], bits, 1)[:, : shape[1]]
    scales, zeros = tensors["weight_scale"].expand(shape[0], -1), tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack(zeros, bits, 0)[:, : shape[0]].mT.contiguous()
    else:
        zeros = _zeros(zeros, bits, scales)
    return _ordered(parts, GroupCodes(bits, codes, scales, zeros, group, tensors.get("weight_g_idx")), first)


def gptq(parts: MatrixTensors, *, minus_one: bool = True) -> MatrixLayout:
    """Transposed: codes packed along the inputs, zero points along the outputs. ``minus_one``: the first version of the format,
    which stores zero points less 1."""
    bits, (words, outputs) = _bits(parts.spec), _matrix(parts, "qweight")[-2:]
    per = 32 // bits
    shape = (outputs, words * per)
    parts.claim("qweight", ("I32",), (words, outputs), ((1, 1), (0, per)))
    group, count, inputs = _groups(parts, "g_idx", shape[1], 0)
    parts.claim("scales", FLOATS, (count, outputs), ((1, 1), inputs))
    if "qzeros" in parts or parts.spec.zero == "int":
        parts.claim("qzeros", ("I32",), (count, _ceil(outputs, per)), ((1, per), inputs))
    return parts.finish(shape, f"gptq {parts.spec.codes}", partial(_gptq, parts, bits, group, minus_one))


def _gptq(
    parts: MatrixTensors, bits: int, group: int, minus_one: bool, tensors: Tensors, shape: tuple[int, ...], first: int
) -> GroupCodes:
    codes, scales = unpack(tensors["qweight"], bits, 0), tensors["scales"].mT.contiguous()
    middle = 2 ** (bits - 1)
    zeros = _zeros(None, bits, scales)
    if "qzeros" in tensors:
        stored = unpack(tensors["qzeros"], bits, 1)[:, : shape[0]].mT
        if parts.spec.zero == "int":
            # Less 1, the zero point 0 wraps around.
            zeros = ((stored + 1) & (2**bits - 1) if minus_one else stored).contiguous()
        elif int(stored.min()) != int(stored.max()) or int(stored.min()) not in (middle - 1, middle):
            # Labels of the two versions are mixed up in checkpoints; symmetric ones show which it is.
            raise parts.error(
                "qzeros",
                f"has zero points from {int(stored.min())} to {int(stored.max())}, and symmetric ones are all {middle - 1} or "
                f"all {middle}",
            )
    return _ordered(parts, GroupCodes(bits, codes, scales, zeros, group, tensors.get("g_idx")), first)


def awq(parts: MatrixTensors) -> MatrixLayout:
    """Transposed: codes and zero points packed along the outputs, in an order of their own."""
    inputs, words = _matrix(parts, "qweight")[-2:]
    shape = (words * 8, inputs)
    parts.claim("qweight", ("I32",), (inputs, words), ((1, 8), (0, 1)))
    group, count, along = _groups(parts, "", inputs, 0)
    parts.claim("scales", FLOATS, (count, shape[0]), ((1, 1), along))
    parts.claim("qzeros", ("I32",), (count, words), ((1, 8), along))
    return parts.finish(shape, "awq int4", partial(_awq, group))


def _awq(group: int, tensors: Tensors, shape: tuple[int, ...], first: int) -> GroupCodes:
    codes, zeros = (unpack(tensors[leaf], 4, 1, AWQ_ORDER).mT.contiguous() for leaf in ("qweight", "qzeros"))
    return GroupCodes(4, codes, tensors["scales"].mT.contiguous(), zeros, group)


def _bits(spec: QuantSpec) -> int:
    return 4 if spec.codes == "int4" else 8


def _groups(parts: MatrixTensors, order: str, inputs: int, axis: int) -> tuple[int, int, tuple[int, int] | None]:
    """(inputs of a group, number of groups, how ranges of inputs lie along ``axis`` of scales). Claims the tensor ``order``."""
    group = parts.spec.group[1] if isinstance(parts.spec.group, tuple) else inputs
    count = _ceil(inputs, group)
    if order in parts:
        parts.claim(order, ("I32", "I64"), (inputs,), (None, (0, 1)))
        # Its values may send any input to any group.
        return group, count, None
    return group, count, (axis, group) if count > 1 else None


def _ordered(parts: MatrixTensors, codes: GroupCodes, first: int) -> GroupCodes:
    """Checks the order of inputs, beside the scales of all groups, and leaves it out where the groups lie one behind the other.

    ``first``: the first of the inputs.
    """
    if codes.order is None:
        return codes
    order, group, inputs = codes.order.long(), codes.group, codes.shape[1]
    usual = torch.arange(first, first + inputs, device=order.device) // group
    if bool((order == -1).all()):
        order = usual
    if first % group == 0 and bool((order == usual).all()):
        groups = slice(first // group, _ceil(first + inputs, group))
        return dataclasses.replace(codes, scales=codes.scales[:, groups], offsets=codes.offsets[:, groups], order=None)
    if int(order.min()) < 0 or int(order.max()) >= codes.scales.shape[1]:
        leaf = parts.first_of("g_idx", "weight_g_idx")
        raise parts.error(
            leaf, f"has groups from {int(order.min())} to {int(order.max())}, and there are {codes.scales.shape[1]}"
        )
    return dataclasses.replace(codes, order=order)


# Two codes in a byte


def fp4(parts: MatrixTensors) -> MatrixLayout:
    """MXFP4 and NVFP4 of compressed-tensors, NVFP4 of modelopt."""
    nvfp4, block = parts.spec.codes == "nvfp4", parts.spec.group[1] if isinstance(parts.spec.group, tuple) else 32
    leaf = parts.first_of("weight_packed", "weight")
    outputs, halves = _matrix(parts, leaf)[-2:]
    if 2 * halves % block:
        raise parts.error(leaf, f"has {2 * halves} inputs, which blocks of {block} do not divide")
    parts.claim(leaf, ("U8",), (outputs, halves), ((0, 1), (1, 2)))
    scale = ("F8_E4M3",) if nvfp4 else ("U8", "F8_E8M0")
    parts.claim("weight_scale", scale, (outputs, 2 * halves // block), ((0, 1), (1, block)))
    if nvfp4:
        parts.claim(parts.first_of("weight_global_scale", "weight_scale_2"), ("F32",), (1,), (None, None))
    return parts.finish((outputs, 2 * halves), parts.spec.codes.upper(), partial(_fp4, leaf, block))


def _fp4(leaf: str, block: int, tensors: Tensors, shape: tuple[int, ...], first: int) -> MicroscaledCodes:
    scales = tensors["weight_scale"]
    if "weight_global_scale" in tensors:
        scales = scales.float() / tensors["weight_global_scale"]
    elif "weight_scale_2" in tensors:
        scales = scales.float() * tensors["weight_scale_2"]
    else:
        scales = scales.view(torch.uint8)
    return MicroscaledCodes(tensors[leaf].reshape(shape[0], -1, block // 2), scales)


def mxfp4_blocks(parts: MatrixTensors) -> MatrixLayout:
    """gpt-oss: ``[experts, N, K / 32, 16]``."""
    *stack, outputs, count, size = _matrix(parts, "blocks")
    outer = tuple((axis, 1) for axis in range(len(stack) + 1))
    inputs = (len(stack) + 1, 2 * size)
    parts.claim("blocks", ("U8",), (*stack, outputs, count, size), (*outer, inputs))
    parts.claim("scales", ("U8",), (*stack, outputs, count), (*outer, inputs))
    return parts.finish((*stack, outputs, 2 * size * count), "MXFP4", _blocks)


def _blocks(tensors: Tensors, shape: tuple[int, ...], first: int) -> MicroscaledCodes:
    return MicroscaledCodes(tensors["blocks"], tensors["scales"])


def int4_bytes(parts: MatrixTensors) -> MatrixLayout:
    """Experts of w4afp8: signed, the lower half of a byte first."""
    outputs, halves = _matrix(parts, "weight")[-2:]
    parts.claim("weight", ("I8",), (outputs, halves), ((0, 1), (1, 2)))
    group, count, along = _groups(parts, "", 2 * halves, 1)
    parts.claim("weight_scale_inv", FLOATS, (outputs, count), ((0, 1), along))
    return parts.finish((outputs, 2 * halves), "int4", partial(_int4_bytes, group))


def _int4_bytes(group: int, tensors: Tensors, shape: tuple[int, ...], first: int) -> GroupCodes:
    pairs, scales = tensors["weight"].view(torch.uint8), tensors["weight_scale_inv"]
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1) ^ 8
    return GroupCodes(4, codes, scales, _zeros(None, 4, scales), group)


LAYOUTS: Mapping[str, Callable[[MatrixTensors], MatrixLayout]] = {
    "scaled": scaled,
    "packed": packed,
    "gptq": gptq,
    "gptq_v2": partial(gptq, minus_one=False),
    "awq": awq,
    "fp4": fp4,
    "mxfp4_blocks": mxfp4_blocks,
    "int4_bytes": int4_bytes,
}
