"""Checkpoints whose matrices are codes, with scales in tensors of their own."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from headrace.config import Decision
from headrace.errors import ConfigError
from headrace.layers.stored import Codes, QuantSpec
from headrace.quant.formats.scheme import Rule, Scheme
from headrace.weights.checkpoint import Checkpoint, StoredTensor, check_scales
from headrace.weights.layouts import FLOATS, INPUT_SCALES, LAYOUTS, LEAVES, SCALES, MatrixLayout, MatrixTensors
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint

_STACKED = {
    "_scale_inv": "weight_scale_inv",
    "_activation_scale": "activation_scale",
    "_blocks": "blocks",
    "_scales": "scales",
}
"""Ends of the names of stacked experts' tensors, which have no ``.weight``."""
_OTHERS = {"_scale_inv": "", "_activation_scale": "", "_scales": "_blocks", "_blocks": "_scales"}
"""Such an end -> that of the tensor of codes beside it."""
_KV_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "k_zero_point", "v_zero_point"})
"""Last components of the names of scales of attention's inputs. The cache computes its own, for each token and head."""
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
"""Types of tensors that are codes and need scales."""


@dataclasses.dataclass(frozen=True)
class _Matrix:
    layout: MatrixLayout
    names: Mapping[str, str]
    """Last component -> name of the stored tensor."""


class ScaledCheckpoint(Checkpoint):
    """A checkpoint in which the codes, scales, zero points and so on of a matrix are one tensor of floats: ``MODULE.weight``;
    that of stacked experts ``NAME`` or, in MXFP4, ``NAME_blocks``.

    Args:
        scheme: the number formats; None: there are no quantised matrices.
        device: where the floats and codes are made, and stay.

    Raises:
        ConfigError: a tensor of a quantised matrix is missing or does not fit it, or belongs to a matrix that the scheme says
            is stored as floats.
    """

    def __init__(self, inner: SafetensorsCheckpoint, scheme: Scheme | None = None, device: str | torch.device = "cpu") -> None:
        self._inner = inner
        self._device = device
        self._matrices: dict[str, _Matrix] = {}
        self._floats = 0
        """Matrices that are stored as floats."""
        self._unneeded = 0
        """Scales of attention's inputs."""
        self._spare: set[str] = set()
        """Biases of quantised matrices."""
        self.tensors: Mapping[str, StoredTensor] = dict(inner.tensors) if scheme is None else self._described(scheme)
        if scheme is None:
            self._refuse_codes()

    def _refuse_codes(self) -> None:
        for name in self._inner.tensors:
            if name.endswith((".qweight", ".weight_packed", ".weight_scale", "_scale_inv", "_blocks")):
                raise ConfigError(
                    f"{name} is part of a quantised matrix, but config.json has no quantization_config", "quantization_config"
                )

    def _described(self, scheme: Scheme) -> dict[str, StoredTensor]:
        tensors = self._inner.tensors
        stored: dict[str, StoredTensor] = {}
        found: dict[str, dict[str, str]] = {}
        """Module -> last component of a name -> name."""
        stacks: dict[str, str] = {}
        """Module of stacked experts -> the name of its tensor of floats."""
        for name in tensors:
            folder, _, leaf = name.rpartition(".")
            ending = next((end for end in _STACKED if leaf.endswith(end)), "")
            module = name.removesuffix(ending)
            if leaf in LEAVES:
                found.setdefault(folder, {})[leaf] = name
            elif ending == "_blocks" or (ending and module + _OTHERS[ending] in tensors):
                found.setdefault(module, {})[_STACKED[ending]] = name
                stacks[module] = module + ("_blocks" if "_blocks" in (ending, _OTHERS[ending]) else "")
            elif leaf in _KV_SCALES or name.endswith(("k_proj.output_scale", "v_proj.output_scale")):
                self._unneeded += 1
            else:
                stored[name] = tensors[name]
        for module, whole in stacks.items():
            if whole == module:
                found[module]["weight"] = whole
                del stored[whole]
        for module, names in found.items():
            whole = stacks.get(module, f"{module}.weight")
            matrix = self._matrix(module, scheme.rule(module), names, module in stacks)
            if matrix is None:
                stored |= {name: tensors[name] for name in names.values()}
                continue
            self._matrices[whole] = matrix
            layout = matrix.layout
            used = [tensors[names[leaf]] for leaf in layout.pieces]
            stored[whole] = StoredTensor(layout.shape, layout.kind, sum(one.nbytes for one in used), used[0].origin)
            self._spare.add(f"{module}.bias")
        return stored

    def _matrix(self, module: str, rule: Rule, names: Mapping[str, str], stacked: bool) -> _Matrix | None:
        """None: it is stored as floats."""
        tensors = {leaf: (name, self._inner.tensors[name]) for leaf, name in names.items()}
        weight = tensors.get("weight")
        if weight is not None and len(tensors) == 1 and weight[1].kind not in _CODES:
            self._floats += len(weight[1].shape) > 1
            return None
        if rule.format is None:
            name, tensor = next((one for leaf, one in tensors.items() if leaf != "weight"), next(iter(tensors.values())))
            raise ConfigError(
                f"{name} ({tensor.kind}) is part of a quantised matrix, but {rule}: {module} is stored as floats", "model"
            )
        if weight is not None and weight[1].kind in FLOATS:
            extra = sorted(name for name in names.values() if name != weight[0])
            raise ConfigError(f"{weight[0]} is stored as {weight[1].kind}, but {extra[0]} is beside it", "model")
        endings = {leaf: end for end, leaf in _STACKED.items()}
        parts = MatrixTensors(
            module,
            rule,
            rule.format.spec,
            tensors,
            lambda leaf: f"{module}{endings.get(leaf, '')}" if stacked else f"{module}.{leaf}",
            self._inner.raw,
        )
        return _Matrix(LAYOUTS[rule.format.layout](parts), names)

    def read(self, name: str, where: Slice | None = None) -> torch.Tensor:
        if name not in self._matrices:
            return self._inner.read(name, where)
        if where is None:
            return self._codes(name, None).dequantize()
        parts = [self._read_range(name, where.axis, *range_) for range_ in where.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=where.axis)

    def codes(self, name: str) -> Codes | None:
        return self._codes(name, None) if name in self._matrices else None

    def spec(self, name: str) -> QuantSpec | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        scale = next((matrix.names[leaf] for leaf in INPUT_SCALES if leaf in matrix.names), None)
        if scale is None or matrix.layout.spec.activations != "static":
            return matrix.layout.spec
        # Experts, and the parts of a fused matrix, have a scale each; the largest holds the inputs of all.
        held = self._inner.raw(scale)
        check_scales(scale, held)
        return dataclasses.replace(matrix.layout.spec, input_scale=float(held.float().max()))

    def may_be_left_out(self, name: str) -> bool:
        """GPTQ's writers give every matrix a bias, of zeros where the model has none."""
        return name in self._spare and not bool(self._inner.read(name).any())

    def decisions(self) -> tuple[Decision, ...]:
        layouts = [matrix.layout for matrix in self._matrices.values()]
        notes = [f"{self._floats} further matrices are stored as floats"]
        if any(layout.kind.startswith("gptq") and layout.spec.zero == "int" for layout in layouts):
            notes.append("zero points are read as checkpoint_format says they are stored")
        if self._unneeded:
            notes.append(f"{self._unneeded} scales of the KV cache are not needed: it computes its own")
        counts = Counter(str(layout.spec) for layout in layouts)
        value = "; ".join(f"{count} of {spec}" for spec, count in counts.items())
        return (Decision("quantised matrices", value, "; ".join(notes)),) if counts else ()

    def _read_range(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Reads the range with the whole of those numbers at its ends that share a word or a scale."""
        layout = self._matrices[name].layout
        size = math.lcm(*(along[1] for piece in layout.pieces.values() if (along := piece.along[axis]) is not None))
        first, last = start // size * size, min(-(-stop // size) * size, layout.shape[axis])
        return self._codes(name, (axis, first, last)).dequantize().narrow(axis, start - first, stop - start)

    def _codes(self, name: str, where: tuple[int, int, int] | None) -> Codes:
        """Codes of the whole, or of a range (axis, start, stop) that splits no numbers with a common word or scale."""
        matrix = self._matrices[name]
        layout, shape, first = matrix.layout, list(matrix.layout.shape), 0
        if where is not None:
            axis, start, stop = where
            shape[axis] = stop - start
            first = start if axis == len(shape) - 1 else 0
        pieces = {}
        for leaf, piece in layout.pieces.items():
            part = None
            if where is not None and (along := piece.along[where[0]]) is not None:
                part = Slice(along[0], ((where[1] // along[1], -(-where[2] // along[1])),))
            read = self._piece(matrix.names[leaf], piece.shape, part)
            if leaf in SCALES:
                check_scales(matrix.names[leaf], read)
            pieces[leaf] = read.to(self._device)
        return layout.decode(pieces, tuple(shape), first)

    def _piece(self, name: str, shape: tuple[int, ...], part: Slice | None) -> torch.Tensor:
        if self._inner.tensors[name].shape == shape:
            return self._inner.raw(name, part)
        whole = self._inner.raw(name).reshape(shape)
        return whole if part is None else part.of(whole)

    def close(self) -> None:
        self._inner.close()


def read_floats(
    files: Sequence[Path], scheme: Scheme, wanted: Callable[[str], object] = lambda name: True
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Reads a quantised checkpoint for a library that takes floats.

    Returns:
        The tensors whose names are wanted, and the names of those that a model may lack.
    """
    with closing(ScaledCheckpoint(SafetensorsCheckpoint(files), scheme)) as checkpoint:
        names = [name for name in checkpoint.tensors if wanted(name)]
        spare = frozenset(name for name in names if checkpoint.may_be_left_out(name))
        return {name: checkpoint.read(name) for name in names}, spare
