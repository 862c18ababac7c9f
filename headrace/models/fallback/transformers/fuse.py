"""Fuses matrices that are multiplied by the same tensor: query, key and value; gate and up.

The trace shows which ones, not their names. Each module keeps its place and name; its
weight becomes rows of a larger one, so loading, updating and exporting go on as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.layers.linear import Linear


def fuse_linears(model: nn.Module, groups: Sequence[Sequence[str]]) -> int:
    """Fuses groups of linear modules, each given by its paths. Groups that cannot be fused are left alone.

    Returns:
        How many groups were fused.
    """
    count = 0
    for paths in groups:
        modules = [model.get_submodule(path) for path in paths]
        if _fusible(modules):
            parts = _fuse([module for module in modules if isinstance(module, nn.Linear)])
            for path, part in zip(paths, parts, strict=True):
                model.set_submodule(path, part)
            count += 1
    return count


def _fusible(modules: Sequence[nn.Module]) -> bool:
    weights = [parameter for module in modules for parameter in module.parameters()]
    return (
        all(type(module) is nn.Linear for module in modules)
        and len({id(module) for module in modules}) == len(modules)
        and len({module.in_features for module in modules}) == 1
        and len({module.bias is None for module in modules}) == 1
        and len({(weight.dtype, weight.device) for weight in weights}) == 1
    )


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A layer over tensors that are there."""
    layer = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer


def product(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """``[..., in] -> [..., out]`` by the engine's own matrix product, which takes rows."""
    return layer.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], layer.out_features)


class Product:
    """The product of one input with all matrices of a group; kept until the next input comes or all parts are taken."""

    def __init__(self, layer: Linear, rows: list[int]) -> None:
        self.layer, self.rows = layer, rows
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """``[..., rows of the part]``"""
        if x is not self._input or index not in self._parts:
            self._input = x
            self._parts = dict(enumerate(torch.split(product(x, self.layer), self.rows, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class FusedPart(nn.Linear):
    """One matrix of a group. Its weight and bias are views of the group's."""

    def __init__(
        self, module: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None, product: Product, index: int
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.product = product
        self.index = index
        """Index of the part in the product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product.part(self.index, input)


@torch.no_grad()
def _fuse(modules: Sequence[nn.Linear]) -> list[FusedPart]:
    rows = [module.out_features for module in modules]
    weight = torch.cat([module.weight.data for module in modules])
    biases = [module.bias.data for module in modules if module.bias is not None]
    bias = torch.cat(biases) if biases else None
    product = Product(layer_of(weight, bias), rows)
    ends = torch.tensor(rows).cumsum(0).tolist()
    return [
        FusedPart(module, weight[end - count : end], None if bias is None else bias[end - count : end], product, index)
        for index, (module, end, count) in enumerate(zip(modules, ends, rows, strict=True))
    ]
