"""Layouts of q, k and v in foreign libraries, and the packed tokens that headrace's attention takes."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a library keeps the axes of q, k and v. The batch axis, if there is one, has size 1: tokens are packed."""

    name: str
    axes: str
    """Of a tensor, in order: b(atch), s(equence), h(eads), d (a head's width)."""

    def pack(self, tensor: torch.Tensor, argument: str, where: str) -> torch.Tensor:
        """A view ``[T, heads, width]``.

        Args:
            argument: the tensor's name, for errors.
            where: whose argument it is, for errors.

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


TRANSFORMERS = Layout("transformers", "bhsd")
TRANSFORMERS_OUT = Layout("transformers", "bshd")
"""What an attention function of transformers returns, which is not what it is given."""
MEGATRON = Layout("Megatron", "sbhd")
FLEET = Layout("PaddleFleet", "bshd")
PACKED = Layout("packed", "shd")
