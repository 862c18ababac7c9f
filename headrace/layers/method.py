"""LinearMethod and ExpertsMethod: how a layer stores its weights and multiplies by them. A number format is a method, and
converting a layer swaps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from headrace.kernels.linear import linear
from headrace.kernels.moe import moe_mlp
from headrace.model_spec import MoeSpec
from headrace.quant.stored import StoredMatrix

if TYPE_CHECKING:
    from headrace.layers.linear import Linear
    from headrace.layers.moe import Experts


class LinearMethod(ABC):
    """The weights of one ``Linear``: a matrix, several fused ones, or the output head.

    The tensors are registered on the layer, so that the model's parameters and buffers are all of its memory. A layer of a
    tensor-parallel rank has the rank's own ``in_features`` and ``out_features`` and loads matrices that were ``cut`` for it.
    """

    format: str
    """The number format, for reports."""
    devices: ClassVar[frozenset[str]]
    batch_invariant: ClassVar[bool] = False
    """Honours ``layer.invariant``."""
    multiples: ClassVar[tuple[int, int]] = 1, 1
    """What outputs and inputs must be multiples of."""

    @classmethod
    def supports(cls, in_features: int, out_features: int, device: str) -> list[str]:
        """Returns why the method does not support a matrix of this shape on this type of device; empty: it does."""
        reasons = [] if device in cls.devices else [f"it runs on {' and '.join(sorted(cls.devices))}, not on {device}"]
        for size, what, multiple in zip((out_features, in_features), ("outputs", "inputs"), cls.multiples, strict=True):
            if size % multiple:
                reasons.append(f"{size} {what} are not a multiple of {multiple}")
        return reasons

    @abstractmethod
    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        """Registers on the layer what holds its weights, in place of what held them before. ``dtype``: of the activations."""

    @abstractmethod
    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        """Fills what ``allocate`` registered.

        Args:
            parts: the matrices of the layer, one below the other: together ``[out_features, in_features]``.

        Returns:
            How far rounding took the weights from the stored ones: root mean square of the difference over that of the exact
            weights, of sampled rows. 0 where the method says nothing of it.
        """

    @abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``, with the layer's bias, in ``layer.out_dtype`` or x's dtype."""

    @abstractmethod
    def dequantize(self, layer: Linear) -> torch.Tensor:
        """Returns the weights that ``apply`` multiplies by, ``[out_features, in_features]`` float32."""


class UnquantizedMethod(LinearMethod):
    """A float parameter ``weight``. Quantised checkpoints are dequantised on loading."""

    format = "floats"
    devices = frozenset({"cpu", "cuda", "meta"})
    batch_invariant = True

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        start = 0
        for part in parts:
            rows = part.read()
            layer.weight.data[start : start + len(rows)].copy_(rows)
            start += len(rows)
        return 0.0

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.weight, layer.bias, layer.out_dtype, invariant=layer.invariant)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return layer.weight.detach().float()


class ExpertsMethod:
    """The matrices of one ``Experts``, as float parameters ``gate_up_proj`` and ``down_proj``. Number formats override it."""

    format = "floats"
    devices = frozenset({"cpu", "cuda", "meta"})

    @classmethod
    def supports(cls, hidden_size: int, spec: MoeSpec, device: str) -> list[str]:
        """Returns why the method does not support these experts on this type of device; empty: it does."""
        return [] if device in cls.devices else [f"it runs on {' and '.join(sorted(cls.devices))}, not on {device}"]

    def allocate(self, layer: Experts, dtype: torch.dtype, device: str | torch.device) -> None:
        for name, shape in layer.shapes.items():
            setattr(layer, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False))

    def load(self, layer: Experts, matrix: str, stored: StoredMatrix, expert: int | None = None, start: int = 0) -> None:
        """Fills rows of ``matrix`` from ``start`` on.

        Args:
            expert: its index; None: ``stored`` is stacked, ``[num_experts, N, K]``.
        """
        whole, rows = layer.get_parameter(matrix).data, stored.read()
        whole = whole if expert is None else whole[expert]
        whole.narrow(-2, start, rows.shape[-2]).copy_(rows)

    def apply(
        self, layer: Experts, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, plus: torch.Tensor | None
    ) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``; ``experts`` and ``weights`` ``[T, top_k]``. ``plus`` of x's shape is added."""
        matrices = layer.gate_up_proj, layer.down_proj
        biases = layer.gate_up_proj_bias, layer.down_proj_bias
        return moe_mlp(x, experts, weights, *matrices, layer.spec, *biases, plus=plus, invariant=layer.invariant)

    def dequantize(self, layer: Experts, matrix: str) -> torch.Tensor:
        """Returns what ``apply`` multiplies by, ``[num_experts, N, K]`` float32."""
        return layer.get_parameter(matrix).detach().float()
