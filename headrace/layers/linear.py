"""Linear: the matrix product of every layer. Its method holds the weights in a number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.layers.embedding import Embedding
from headrace.layers.method import LinearMethod, UnquantizedMethod
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
        self.invariant = False
        """Each row's result is bitwise independent of the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        return self.method.apply(self, x)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias is not None else ''}, {self.method.format}"


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


def connect(model: nn.Module, group: Group) -> None:
    """Makes the model's modules communicate with those of the other ranks: each that does so has an attribute ``group``."""
    for module in model.modules():
        if hasattr(module, "group"):
            module.group = group  # type: ignore[assignment]


def make_invariant(model: object) -> None:
    """From now on what each row of the model's products comes to does not depend on the other rows.

    A module that can do so has an attribute ``invariant``.

    Raises:
        ConfigError: a module has matrices that it multiplies by itself.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"deterministic: {type(model).__name__} is not a torch module", "deterministic")
    for name, module in model.named_modules():
        varies = isinstance(module, Linear) and not module.method.batch_invariant
        if hasattr(module, "invariant") and not varies:
            module.invariant = True
        elif varies or (not isinstance(module, Embedding) and any(one.ndim > 1 for one in module.parameters(recurse=False))):
            raise ConfigError(
                f"deterministic: {name} ({type(module).__name__}) has no product whose rows are independent of each other",
                "deterministic",
            )
