"""Linear: the matrix product of every layer. Its LinearMethod holds the weights in a number format; converting a layer swaps
the method."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from headrace.config import MemoryLine
from headrace.errors import ConfigError
from headrace.kernels.linear import linear, linear_adapted, linear_adapted_gated, linear_gated
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows
from headrace.kernels.lora import Factors, expand, shrink
from headrace.layers.embedding import Embedding
from headrace.layers.lora import LoraTables
from headrace.layers.stored import Codes, StoredMatrix
from headrace.parallel.group import Group


class Linear(nn.Module):
    """``y = x W^T + b``. The parameters are allocated and not initialised."""

    weight: nn.Parameter
    """``[out_features, in_features]``, where the method is ``UnquantizedMethod``."""

    stored_rows: Mapping[str, Callable[[], Sequence[int]]] = {}
    """Gives for each of its outputs which output of the checkpoint's matrix it is, where a checkpoint has them in another
    order: by the matrix's name there, without what is before the last dot."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.method: LinearMethod = UnquantizedMethod()
        self.method.allocate(self, dtype, device)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        self.out_dtype: torch.dtype | None = None
        """Dtype of the result; None: that of the input."""
        self.exact = False
        """A float32 result of factors of 16 bits is rounded to no other type."""
        self.batch_invariant = False
        """Each row's result is bitwise independent of the other rows."""
        self.lora: LoraTables | None = None
        """Additions of adapters to the result, whatever format the weights have. They are no part of the weights."""

    def forward(self, x: Activations) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``. ``Fp8Rows`` are for a layer that has ``rounds``."""
        factors = None if self.lora is None else self.lora.factors(x.rows if isinstance(x, Fp8Rows) else len(x))
        if factors is not None:
            return self.method.apply_adapted(self, x, factors)
        return self.method.apply_rounded(self, x) if isinstance(x, Fp8Rows) else self.method.apply(self, x)

    def gated(self, x: Activations) -> torch.Tensor | None:
        """``silu_mul`` of the result for ``[T, in_features]``, where one kernel computes both; None: none does."""
        if self.bias is not None or self.out_dtype is not None:
            return None
        factors = None if self.lora is None else self.lora.factors(x.rows if isinstance(x, Fp8Rows) else len(x))
        if isinstance(x, Fp8Rows):
            return None if factors is not None else self.method.apply_rounded_gated(self, x)
        if factors is not None:
            return self.method.apply_adapted_gated(self, x, factors)
        return self.method.apply_gated(self, x)

    def streams(self, rows: int) -> bool:
        """Whether the product of so many rows fills the shared memory of all multiprocessors with weights."""
        return self.method.streams(self, rows)

    def memory(self) -> list[MemoryLine]:
        return self.method.memory(self)

    @property
    def rounds(self) -> int | None:
        """Channels that share a scale in the FP8 rows that the layer multiplies. Whatever makes its input may round it so, and
        the result is the same. None: it multiplies floats."""
        return self.method.group(self)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self,)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias is not None else ''}, {self.method.format}"


class LinearMethod(ABC):
    """The weights of one ``Linear``: a matrix, several fused ones, or the output head.

    The tensors are registered on the layer, so that the model's parameters and buffers are all of its memory. A layer of a
    tensor-parallel rank has the rank's own ``in_features`` and ``out_features`` and loads matrices that were ``cut`` for it.
    """

    format: str
    """The number format, for reports."""
    devices: ClassVar[frozenset[str]]
    kernel: ClassVar[str] = ""
    """The kernels that multiply, for reports; empty where ``format`` says them, or where they depend on the machine."""
    batch_invariant: ClassVar[bool] = False
    """Honours ``layer.batch_invariant``."""
    constants: frozenset[str] = frozenset()
    """Names of buffers that no update of the weights writes: orders of inputs, and counters of kernels."""
    multiples: ClassVar[tuple[int, int]] = 1, 1
    """Numbers of which outputs and inputs must be multiples."""

    @classmethod
    def supports(cls, in_features: int, out_features: int, device: str) -> list[str]:
        """Returns why the method does not support a matrix of this shape on this type of device; empty: it does."""
        reasons = [] if device in cls.devices else [f"it runs on {' and '.join(sorted(cls.devices))}, not on {device}"]
        for size, what, multiple in zip((out_features, in_features), ("outputs", "inputs"), cls.multiples, strict=True):
            if size % multiple:
                reasons.append(f"{size} {what} are not a multiple of {multiple}")
        return reasons

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        """Returns whether the method holds a checkpoint's codes and their scales as they are."""
        return False

    @classmethod
    def holds_all(cls, parts: Sequence[Codes]) -> bool:
        """Returns whether it holds these, one below the other."""
        return all(map(cls.holds, parts))

    @abstractmethod
    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        """Registers on the layer what holds its weights, in place of what held them before. ``dtype``: of the activations."""

    def fresh(self) -> LinearMethod:
        """Returns a method like this one for another layer, to be allocated and loaded."""
        return copy.copy(self)

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

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """``silu_mul`` of ``apply`` of a layer without a bias, or None; the result is the same but for rounding."""
        return None

    def group(self, layer: Linear) -> int | None:
        """Returns the channels that share a scale, where ``apply`` rounds rows to FP8 and ``apply_rounded`` takes such rows."""
        return None

    def apply_rounded(self, layer: Linear, x: Fp8Rows) -> torch.Tensor:
        """``apply`` of the rows that have been rounded to x: ``[T, out_features]``."""
        raise TypeError(f"{self.format} are not multiplied by rounded rows")

    def apply_rounded_gated(self, layer: Linear, x: Fp8Rows) -> torch.Tensor | None:
        """``silu_mul`` of ``apply_rounded`` of a layer without a bias, or None."""
        return None

    def streams(self, layer: Linear, rows: int) -> bool:
        """``Linear.streams``."""
        return False

    def apply_adapted(self, layer: Linear, x: Activations, factors: Factors) -> torch.Tensor:
        """``apply``, or ``apply_rounded``, and what adapters add: ``[T, out_features]``."""
        # Merged weights would multiply the rounded rows too.
        floats = x.floats() if isinstance(x, Fp8Rows) else x
        added = shrink(floats, factors, batch_invariant=layer.batch_invariant)
        y = self.apply_rounded(layer, x) if isinstance(x, Fp8Rows) else self.apply(layer, x)
        expand(added, y, batch_invariant=layer.batch_invariant)
        return y

    def apply_adapted_gated(self, layer: Linear, x: torch.Tensor, factors: Factors) -> torch.Tensor | None:
        """``silu_mul`` of ``apply_adapted`` of a layer without a bias, or None."""
        return None

    @abstractmethod
    def dequantize(self, layer: Linear) -> torch.Tensor:
        """Returns the weights that ``apply`` multiplies by, ``[out_features, in_features]`` float32."""

    def memory(self, layer: Linear) -> list[MemoryLine]:
        """Reports the layer's buffers. Parameters are counted with the model's, since layers may share them."""
        return packed_memory(layer, self.format)


def packed_memory(layer: nn.Module, format: str) -> list[MemoryLine]:
    """Reports the buffers of a layer, in which its method of this format holds the weights."""
    nbytes = sum(buffer.nbytes for buffer in layer.buffers())
    return [MemoryLine("packed weights", nbytes, format)] if nbytes else []


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
        options = {"batch_invariant": layer.batch_invariant, "exact": layer.exact}
        return linear(x, layer.weight, layer.bias, layer.out_dtype, **options)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor | None:
        return linear_gated(x, layer.weight, batch_invariant=layer.batch_invariant)

    def apply_adapted(self, layer: Linear, x: Activations, factors: Factors) -> torch.Tensor:
        if isinstance(x, Fp8Rows):  # Of a subclass that rounds.
            return super().apply_adapted(layer, x, factors)
        options = {"batch_invariant": layer.batch_invariant, "exact": layer.exact}
        return linear_adapted(x, layer.weight, layer.bias, layer.out_dtype, factors, **options)

    def apply_adapted_gated(self, layer: Linear, x: torch.Tensor, factors: Factors) -> torch.Tensor | None:
        return linear_adapted_gated(x, layer.weight, factors, batch_invariant=layer.batch_invariant)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return layer.weight.detach().float()


class FusedLinear(Linear):
    """Several matrices of one input as one: their outputs side by side.

    Args:
        parts: the last component of each matrix's name in a checkpoint -> its outputs, in order.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool = False, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)


class RowParallelLinear(Linear):
    """A matrix whose inputs are dealt to tensor-parallel ranks: the product with the whole is the sum over ranks, which the
    norm behind it makes (``RMSNorm.add``).

    Its bias is that of rank 0, and zeros on the others.
    """


def lay_behind(layers: Sequence[Linear]) -> None:
    """Moves the float weights of layers that multiply the same input behind each other in memory, so that ``multiply_together``
    needs one product. Does nothing where they have another format, or a bias."""
    if any(not isinstance(layer.method, UnquantizedMethod) or layer.bias is not None for layer in layers):
        return
    joint = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, joint.split_with_sizes([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part


def multiply_together(x: Activations, first: Linear, second: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``first(x), second(x)`` for ``[T, in_features]``, by one product if the weights lie together. Results may be
    slices."""
    if isinstance(x, torch.Tensor) and first.lora is None and second.lora is None and _together(first, second):
        rows = first.out_features, second.out_features
        weight = first.weight.as_strided((sum(rows), first.in_features), (first.in_features, 1))
        one, other = linear(x, weight, batch_invariant=first.batch_invariant).split_with_sizes(rows, dim=1)
        return one, other
    return first(x), second(x)


def _together(first: Linear, second: Linear) -> bool:
    """Whether the weights are floats that lie behind each other: whoever replaces one of them need not know of the other."""
    if not (isinstance(first.method, UnquantizedMethod) and isinstance(second.method, UnquantizedMethod)):
        return False
    one, other = first.weight, second.weight
    behind = one.data_ptr() + one.nbytes == other.data_ptr()
    return behind and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def connect(model: nn.Module, group: Group) -> None:
    """Makes the model's modules communicate with those of the other ranks: each that does so has an attribute ``group``."""
    for module in model.modules():
        if hasattr(module, "group"):
            module.group = group  # type: ignore[assignment]


def make_invariant(model: object) -> None:
    """Makes matrix products batch-invariant: no row of a product depends on other rows.

    A module that can do so has an attribute ``batch_invariant``.

    Raises:
        ConfigError: a module has matrices that it multiplies by itself.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"deterministic: {type(model).__name__} is not a torch module", "deterministic")
    for name, module in model.named_modules():
        varies = isinstance(module, Linear) and not module.method.batch_invariant
        if hasattr(module, "batch_invariant") and not varies:
            module.batch_invariant = True
        elif varies or (not isinstance(module, Embedding) and any(one.ndim > 1 for one in module.parameters(recurse=False))):
            raise ConfigError(
                f"deterministic: {name} ({type(module).__name__}) has no product whose rows are independent of each other",
                "deterministic",
            )
