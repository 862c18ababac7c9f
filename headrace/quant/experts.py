"""Experts in the number formats of checkpoints, or rounded to FP8 while they load."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import E4M3_MAX, LEAST_SCALE
from headrace.kernels.moe.codes import (
    BLOCK,
    HALF_PLACE,
    MIDDLE,
    PLACE,
    X_GROUP,
    ExpertCodec,
    ExpertCodes,
    pack_words,
    scales_sums,
)
from headrace.layers.moe import Experts, ExpertsMethod
from headrace.layers.stored import Codes, QuantSpec, StoredMatrix
from headrace.model_spec import MoeSpec
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.groups import GroupCodes, narrow
from headrace.quant.packed import integer_codes


class Encoded(NamedTuple):
    """Some outputs of one expert, as ``ExpertCodes`` holds them."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    """``[K]`` int32"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """The number format of one stacked matrix, as ``ExpertCodes`` describes it."""

    codec: ExpertCodec
    group: tuple[int, int]
    zeros: bool = False
    """The codes have integer zero points."""
    minima: bool = False
    """They have minima, or zero points that are held as such."""
    x_group: int | None = None
    x_scale: float | None = None

    def __str__(self) -> str:
        outputs, inputs = self.group
        names = {"e4m3": "FP8", "mxfp4": "MXFP4"}
        shared = "a scale for each output" if self.codec == "e4m3" and outputs == 1 else f"groups of {inputs}"
        if outputs > 1:
            shared = f"a scale for each {outputs} x {inputs}"
        rounded = "" if self.x_group is None or self.codec == "e4m3" else ", activations in FP8"
        minima = " with minima" if self.minima else ""
        return f"{names.get(self.codec, self.codec)}, {shared}{minima}{rounded}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsFacts:
    """Experts, and the stored matrices that they are to hold."""

    hidden_size: int
    spec: MoeSpec
    device: str
    stored: Mapping[str, Sequence[StoredMatrix]]
    """Those of each matrix of ``Experts``, by its name."""

    @property
    def kinds(self) -> str:
        return " and ".join(dict.fromkeys(stored.kind for matrix in self.stored.values() for stored in matrix))

    def shape(self, matrix: str) -> tuple[int, int, int]:
        count, inner = self.spec.num_held, self.spec.intermediate_size
        first = (count, self.spec.first_outputs, self.hidden_size)
        return first if matrix == "gate_up_proj" else (count, self.hidden_size, inner)

    def rows(self, matrix: str) -> int:
        """Outputs of a stored matrix: gate and up are two."""
        return self.spec.intermediate_size if matrix == "gate_up_proj" else self.hidden_size


class ExpertsCandidate(ABC):
    """A way to hold experts. Each returns reasons against itself; the first without any takes them."""

    keeps: frozenset[str] = frozenset()
    """The codes of checkpoints that it can hold as they are, as ``QuantSpec.codes`` names them."""

    def concerns(self, facts: ExpertsFacts) -> bool:
        """Returns whether the candidate is worth a word about these experts if it does not take them."""
        return True

    @abstractmethod
    def misfits(self, facts: ExpertsFacts) -> list[str]:
        """Returns why it does not hold these experts; empty: it does."""

    @abstractmethod
    def method(self, facts: ExpertsFacts) -> ExpertsMethod:
        """Returns a new method for experts that it holds."""

    @abstractmethod
    def reason(self, facts: ExpertsFacts) -> str:
        """Returns how the stored numbers become those that are held, for reports."""


class KeepExperts(ExpertsCandidate):
    """Keeps codes and scales of a checkpoint as they are."""

    keeps = frozenset({"e4m3", "int4", "int8", "mxfp4", "nvfp4"})

    def concerns(self, facts: ExpertsFacts) -> bool:
        return any(stored.spec is not None for matrix in facts.stored.values() for stored in matrix)

    def misfits(self, facts: ExpertsFacts) -> list[str]:
        found: list[str] = []
        for matrix in facts.stored:
            formats = _formats(facts, matrix)
            found += [why for why in formats if isinstance(why, str)]
            if len(formats) > 1:
                found.append(f"the experts' parts of {matrix} have different number formats")
            # Only its values say whether an order is another one; all experts are alike.
            first = facts.stored[matrix][0]
            if not found and first.spec is not None and first.spec.order == "g_idx":
                codes, inputs = first.codes, facts.shape(matrix)[2]
                if isinstance(codes, GroupCodes) and codes.order is not None and codes.shape[1] != inputs:
                    found.append("a rank's part cuts groups of inputs in another order (desc_act, actorder)")
        return found

    def method(self, facts: ExpertsFacts) -> CodedExperts:
        formats = {matrix: _formats(facts, matrix)[0] for matrix in facts.stored}
        return CodedExperts({matrix: one for matrix, one in formats.items() if isinstance(one, ExpertFormat)})

    def reason(self, facts: ExpertsFacts) -> str:
        return "whose numbers are kept"


@dataclasses.dataclass(frozen=True)
class RoundExperts(ExpertsCandidate):
    """Rounds floats, and codes that are not kept, to e4m3.

    Args:
        blocks: with a scale for each block of outputs and inputs, or for each output.
    """

    blocks: bool

    def misfits(self, facts: ExpertsFacts) -> list[str]:
        return []

    def method(self, facts: ExpertsFacts) -> CodedExperts:
        formats = {}
        for matrix in facts.stored:
            inputs = facts.shape(matrix)[2]
            group, x_group = (1, inputs), inputs
            if self.blocks:
                group, x_group = (_shared_outputs(X_GROUP, facts.rows(matrix)), X_GROUP), X_GROUP
            formats[matrix] = ExpertFormat(codec="e4m3", group=group, x_group=x_group)
        return CodedExperts(formats, rounds=True)

    def reason(self, facts: ExpertsFacts) -> str:
        return "rounded to FP8"


def _formats(facts: ExpertsFacts, matrix: str) -> list[ExpertFormat | str]:
    """The formats of all experts' parts of a matrix, each once, or why they are not kept."""
    specs = [stored.spec for stored in facts.stored[matrix]]
    scales = [spec.input_scale for spec in specs if spec is not None and spec.input_scale is not None]
    alike = dict.fromkeys(None if spec is None else dataclasses.replace(spec, input_scale=None) for spec in specs)
    # Static scales of activations are the largest of all experts': tokens are rounded before they are dealt out.
    largest = max(scales, default=None)
    found = dict.fromkeys(_format(spec, largest, facts.shape(matrix)[2], facts.rows(matrix)) for spec in alike)
    formats = [one for one in found if isinstance(one, ExpertFormat)]
    common = _common(formats) if len(found) == len(formats) > 1 else None
    return list(found) if common is None else [common]


def _format(spec: QuantSpec | None, x_scale: float | None, inputs: int, rows: int) -> ExpertFormat | str:
    if spec is None:
        return "not all experts are stored as codes in the order of the layer"
    if spec.codes == "mxfp4":
        return (
            ExpertFormat(codec="mxfp4", group=(1, PLACE))
            if inputs % PLACE == 0
            else f"{inputs} inputs are no multiple of {PLACE}"
        )
    tile = spec.group if isinstance(spec.group, tuple) else (1, inputs)
    group = tile[1]
    if group < inputs and inputs % group:
        # A rank's part begins within a group, or the last group is short: parts of groups hold the same numbers.
        group = math.gcd(group, inputs)
    group = min(group, inputs)
    x_group = {"none": None, "token": inputs, "group128": X_GROUP, "static": inputs}[spec.activations]
    x_group = x_group if spec.activation_codes == "e4m3" else None
    if spec.codes == "e4m3":
        if group < inputs and (not scales_sums(group) or group & (group - 1)):
            return f"groups of {group} inputs share a scale: kernels of FP8 take powers of two from {PLACE} on"
        return ExpertFormat(codec="e4m3", group=(_shared_outputs(tile[0], rows), group), x_group=x_group)
    if tile[0] != 1:
        return f"tiles of {tile[0]} outputs share a scale"
    if group < inputs and group % HALF_PLACE:
        return f"groups of {group} inputs share a scale: kernels here take multiples of {HALF_PLACE}"
    on_sums = group == inputs or scales_sums(group)
    codec: ExpertCodec = "int4" if spec.codes == "int4" else "int8"
    minima = spec.zero == "min" or (spec.zero == "int" and not (codec == "int4" and on_sums))
    if x_group is not None and (codec == "int8" or minima or not on_sums or (spec.order != "none" and x_group < inputs)):
        return f"no kernel here multiplies experts of {spec}"
    static = x_scale if spec.activations == "static" and x_group is not None else None
    zeros = spec.zero == "int" and not minima
    return ExpertFormat(codec=codec, group=(1, group), zeros=zeros, minima=minima, x_group=x_group, x_scale=static)


def _common(formats: Sequence[ExpertFormat]) -> ExpertFormat | None:
    """The format of integers that holds all of these; None: there is none."""
    group = min(one.group[1] for one in formats)
    if any(one.codec not in MIDDLE or one.x_group is not None or one.group[1] % group for one in formats):
        return None
    codec: ExpertCodec = "int8" if any(one.codec == "int8" for one in formats) else "int4"
    offsets = any(one.zeros or one.minima for one in formats)
    zeros = offsets and codec == "int4" and not any(one.minima for one in formats)
    return ExpertFormat(codec=codec, group=(1, group), zeros=zeros, minima=offsets and not zeros)


def _shared_outputs(tile: int, rows: int) -> int:
    """The outputs that share a scale as they are held: parts of tiles where gate or up, or a rank's part, ends within one."""
    return next((size for size in (128, 64) if tile % size == 0 and rows % size == 0), 1)


class CodedExperts(ExpertsMethod):
    """Experts as codes. Their products are as exact as those of floats; activations are rounded where the format says so.

    Buffers: ``gate_up_proj_codes``, ``_scales``, ``_offsets`` and ``_order``, and those of ``down_proj``. They must stay where
    they are.

    Args:
        formats: by matrix.
        rounds: the formats are not those of the checkpoint.
    """

    constants = ("_x_scale", "_order")

    def __init__(self, formats: Mapping[str, ExpertFormat], *, rounds: bool = False) -> None:
        self.formats = formats
        self.takes_codes = not rounds
        self.format = " and ".join(dict.fromkeys(str(one) for one in formats.values()))

    def error(self) -> float:
        error, size = self._squares.tolist()
        return float((error / size) ** 0.5) if size else 0.0

    def allocate(self, layer: Experts, dtype: torch.dtype, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._squares = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of the squares of rounding errors and of weights."""
        self._orders = ExpertOrders()
        for matrix, (count, outputs, inputs) in layer.shapes.items():
            if matrix in layer._parameters:
                delattr(layer, matrix)
            own = self.formats[matrix]
            if own.codec == "e4m3":
                codes = torch.empty(count, outputs, inputs, dtype=torch.uint8, device=device)
            else:
                blocks = -(-inputs // BLOCK)
                words = torch.int32 if own.codec == "int8" else torch.int16
                codes = torch.empty(count, blocks, outputs, PLACE, dtype=words, device=device)
            layer.register_buffer(f"{matrix}_codes", codes)
            for name in ("scales", "offsets", "order"):
                layer.register_buffer(f"{matrix}_{name}", None)
            x_scale = None if own.x_scale is None else torch.full((1,), own.x_scale, dtype=torch.float32, device=device)
            layer.register_buffer(f"{matrix}_x_scale", x_scale)

    def load(self, layer: Experts, matrix: str, stored: StoredMatrix, expert: int | None = None, start: int = 0) -> None:
        own = self.formats[matrix]
        if not self.takes_codes:
            self.load_floats(layer, matrix, stored.exact(), expert, start)
            return
        codes = stored.codes
        if codes is None:
            raise ConfigError(f"{matrix} of experts is stored as {stored.kind}, where codes are expected", "model")
        stacked = range(layer.shapes[matrix][0]) if expert is None else (expert,)
        for index in stacked:
            one = codes if expert is not None else take_experts(codes, index, index + 1)
            self._fill(layer, matrix, index, start, encode(one, own, self._device))

    def rounds(self, matrix: str) -> bool:
        return self.formats[matrix].codec == "e4m3"

    def load_floats(self, layer: Experts, matrix: str, floats: torch.Tensor, expert: int | None, start: int) -> None:
        held = floats.to(self._device)
        for index, one in enumerate(held if expert is None else held[None]):
            encoded = self._rounded(one.float(), self.formats[matrix])
            self._fill(layer, matrix, index if expert is None else expert, start, encoded)

    def _fill(self, layer: Experts, matrix: str, expert: int, start: int, encoded: Encoded) -> None:
        codes, scales, offsets, order = encoded
        count, outputs, _ = layer.shapes[matrix]
        own = self.formats[matrix]
        self._orders.hold(layer, matrix, expert, order)
        whole = layer.get_buffer(f"{matrix}_codes")[expert]
        whole.narrow(-2, start, codes.shape[-2]).copy_(codes)
        for name, values in (("scales", scales), ("offsets", offsets)):
            if values is not None:
                self._hold(layer, f"{matrix}_{name}", values, (count, values.shape[0], outputs // own.group[0]))
                held = layer.get_buffer(f"{matrix}_{name}")[expert]
                held.narrow(-1, start // own.group[0], values.shape[-1]).copy_(values)

    def _hold(self, layer: Experts, name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Allocates a buffer when the first values come, which show their type. Those of several types are held in float32."""
        held = layer._buffers[name]
        if held is None:
            layer._buffers[name] = torch.empty(shape, dtype=values.dtype, device=self._device)
        elif held.dtype != values.dtype:
            layer._buffers[name] = held.float()

    def _rounded(self, weight: torch.Tensor, own: ExpertFormat) -> Encoded:
        (outputs, inputs), (tall, wide) = weight.shape, own.group
        padded = torch.nn.functional.pad(weight, (0, -inputs % wide))
        blocks = padded.view(outputs // tall, tall, -1, wide)
        scales = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp_min(LEAST_SCALE)
        factors = scales[:, None, :, None]
        codes = (blocks / factors).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        # In float64 only the two sums.
        error = codes.float().mul_(factors).sub_(blocks)
        self._squares += torch.stack([one.square().sum(dtype=torch.float64) for one in (error, weight)])
        return Encoded(codes.view(padded.shape)[:, :inputs].view(torch.uint8), scales.t())

    def codes(self, layer: Experts, matrix: str) -> ExpertCodes:
        own = self.formats[matrix]
        names = ("codes", "scales", "offsets", "x_scale", "order")
        codes, scales, offsets, x_scale, order = (layer._buffers[f"{matrix}_{name}"] for name in names)
        if codes is None or scales is None:
            raise ValueError(f"{matrix} is not loaded")
        return ExpertCodes(own.codec, layer.shapes[matrix], codes, scales, own.group, offsets, own.x_group, x_scale, order)

    def factors(self, layer: Experts) -> tuple[ExpertCodes, ExpertCodes]:
        return self.codes(layer, "gate_up_proj"), self.codes(layer, "down_proj")

    def dequantize(self, layer: Experts, matrix: str) -> torch.Tensor:
        held = self.codes(layer, matrix)
        return torch.stack([held.dequantize(expert) for expert in range(held.shape[0])])


def encode(codes: Codes, own: ExpertFormat, device: torch.device) -> Encoded:
    """Brings the codes of some outputs of one expert, alone or in a stack of one, into the form in which they are held.

    Raises:
        ConfigError: they are not in the format that the checkpoint's description means.
    """
    if isinstance(codes, TileCodes):
        values, scales = (held.to(device).flatten(0, -2) for held in (codes.values, codes.scales_of(*own.group)))
        return Encoded(values.view(torch.uint8), scales.t())
    if isinstance(codes, MicroscaledCodes) and own.codec == "mxfp4":
        pairs = codes.blocks.to(device).flatten(0, -3)
        numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
        return Encoded(pack_words(numbers), codes.scales.to(device).flatten(0, -2).t())
    integers = integer_codes(codes)
    if integers is None:
        raise ConfigError(f"experts as {type(codes).__name__} are not kept: set quantization none", "quantization")
    ordered = integers.sort()
    if ordered is None:
        raise ConfigError(
            "experts whose inputs are in another order (desc_act, actorder), with groups of several sizes, are not kept: set "
            "quantization none",
            "quantization",
        )
    held = ordered[1].divide(own.group[1])
    numbers, bits = held.codes.to(device), 8 if own.codec == "int8" else 4
    offsets = None
    if own.minima:
        offsets = narrow(held.mins.to(device)).t()
    elif own.zeros:
        offsets = (held.offsets.to(device).to(torch.int16) - MIDDLE["int4"]).to(torch.int8).t()
    elif held.bits < bits:
        numbers = numbers + (MIDDLE["int8"] - MIDDLE["int4"])
    order = None if integers.order is None else ordered[0].int().to(device)
    return Encoded(pack_words(numbers, bits), narrow(held.scales.to(device)).t(), offsets, order)


class ExpertOrders:
    """Fills buffers ``[num_held, inputs]`` of experts with the input at each place, where a checkpoint's groups are not of
    neighbours. Of experts in which all are, there is no buffer."""

    def __init__(self) -> None:
        self._loaded: set[tuple[str, int]] = set()
        """Matrices and experts of which a part is loaded."""

    def hold(self, layer: Experts, matrix: str, expert: int, order: torch.Tensor | None) -> None:
        """Raises ConfigError if another part of the matrix has another order."""
        name, (count, _, inputs) = f"{matrix}_order", layer.shapes[matrix]
        held = layer._buffers[name]
        if held is None and order is not None:
            held = torch.arange(inputs, dtype=order.dtype, device=order.device).repeat(count, 1)
            layer._buffers[name] = held
        if held is not None:
            own = torch.arange(inputs, dtype=held.dtype, device=held.device) if order is None else order
            if (matrix, expert) in self._loaded and not torch.equal(held[expert], own):
                raise ConfigError(
                    f"gate and up of expert {expert} have inputs in different orders: set quantization none", "quantization"
                )
            held[expert] = own
        self._loaded.add((matrix, expert))


def take_rows(codes: Codes, rows: Sequence[int]) -> Codes:
    """The outputs in another order. Tiles become lower ones where outputs of several come to lie in one."""
    if isinstance(codes, GroupCodes):
        order = torch.tensor(rows, device=codes.codes.device)
        names = ("codes", "scales", "offsets")
        return dataclasses.replace(codes, **{name: getattr(codes, name).index_select(0, order) for name in names})
    if isinstance(codes, MicroscaledCodes):
        order = torch.tensor(rows, device=codes.blocks.device)
        return MicroscaledCodes(codes.blocks.index_select(-3, order), codes.scales.index_select(-2, order))
    if not isinstance(codes, TileCodes):
        raise TypeError(f"{type(codes).__name__} have no rows")
    order = torch.tensor(rows, device=codes.values.device)
    tall, tiles = codes.tile[0], order // codes.tile[0]
    while not torch.equal(tiles, tiles[::tall].repeat_interleave(tall)[: len(tiles)]):
        tall = tall // 2 if tall % 2 == 0 else 1
    values = codes.values.view(torch.uint8).index_select(-2, order).view(codes.values.dtype)
    return TileCodes(values, codes.scales.index_select(-2, tiles[::tall]), (tall, codes.tile[1]))


def take_experts(codes: Codes, start: int, stop: int) -> Codes:
    """Some of stacked matrices."""
    if isinstance(codes, TileCodes):
        return dataclasses.replace(codes, values=codes.values[start:stop], scales=codes.scales[start:stop])
    if isinstance(codes, MicroscaledCodes):
        return MicroscaledCodes(codes.blocks[start:stop], codes.scales[start:stop])
    raise ConfigError(f"stacked experts as {type(codes).__name__} are not read", "model")
