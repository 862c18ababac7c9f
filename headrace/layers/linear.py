"""Linear: the one matrix product of the engine, so that number formats and adapters are transformations of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.kernels.linear import linear
from headrace.layers.embedding import Embedding


class Linear(nn.Module):
    """``y = x W^T + b``, plainly. The parameters are not initialised: weights are loaded into them."""

    stored_rows: Mapping[str, Callable[[], Sequence[int]]] = {}
    """Gives for each of its outputs which output of the checkpoint's matrix it is, where a checkpoint has them in another
    order: by the matrix's name there, without what is before the last dot."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)
        """``[out_features, in_features]``"""
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        self.out_dtype: torch.dtype | None = None
        """Of what comes out; None: x's."""
        self.invariant = False
        """A row comes out bitwise the same whatever the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        return linear(x, self.weight, self.bias, self.out_dtype, invariant=self.invariant)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias is not None else ''}"


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


def make_invariant(model: object) -> None:
    """From now on what each row of the model's products comes to does not depend on the other rows.

    A module that can do so has an attribute ``invariant``.

    Raises:
        ConfigError: a module has matrices that it multiplies by itself.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"deterministic: {type(model).__name__} is no module whose products could be told", "deterministic")
    for name, module in model.named_modules():
        if hasattr(module, "invariant"):
            module.invariant = True
        elif not isinstance(module, Embedding) and any(one.ndim > 1 for one in module.parameters(recurse=False)):
            raise ConfigError(
                f"deterministic: {name} ({type(module).__name__}) has no product whose rows are independent of each other",
                "deterministic",
            )
