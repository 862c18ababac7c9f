"""Converts between the layouts of q, k and v in foreign libraries and the packed tokens of headrace's attention."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class AxisLayout:
    """The order of axes in a library's q, k and v. A batch axis has size 1, since tokens are packed."""

    name: str
    axes: str
    """One letter an axis: b(atch), s(equence), h(eads), d (a head's width)."""

    def pack(self, tensor: torch.Tensor, argument: str, where: str) -> torch.Tensor:
        """A view ``[T, heads, width]``.

        Args:
            argument: the tensor's name, for errors.
            where: the layer, for errors.

        Raises:
            ValueError: the rank is not the layout's, or the batch is not 1.
        """
        if tensor.dim() != len(self.axes):
            raise ValueError(
                f"{where}: {argument} has {tensor.dim()} dimensions, {list(tensor.shape)}; {self.name} gives "
                f"{len(self.axes)}, [{', '.join(self.axes)}]"
            )
        batch = self.axes.find("b")
        if batch >= 0:
            if tensor.shape[batch] != 1:
                raise ValueError(f"{where}: {argument} has a batch of {tensor.shape[batch]}; a step's tokens are packed in 1")
            tensor = tensor.squeeze(batch)
        rest = self.axes.replace("b", "")
        return tensor.permute([rest.index(axis) for axis in "shd"])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """``[T, heads, width]``, a view in the layout: the inverse of ``pack``."""
        rest = self.axes.replace("b", "")
        tensor = packed.permute(["shd".index(axis) for axis in rest])
        batch = self.axes.find("b")
        return tensor if batch < 0 else tensor.unsqueeze(batch)


TRANSFORMERS = AxisLayout("transformers", "bhsd")
TRANSFORMERS_OUT = AxisLayout("transformers", "bshd")
"""The result of transformers' attention functions, whose layout differs from the input's."""
MEGATRON = AxisLayout("Megatron", "sbhd")
