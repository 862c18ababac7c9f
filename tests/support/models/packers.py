"""Packs matrices as the writers of GPTQ and AWQ do, number by number, in a second way than the reader's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The 4-bit place, from the lowest, of each of the eight numbers of a word."""


def words(numbers: torch.Tensor, bits: int, places: Sequence[int] | None = None) -> torch.Tensor:
    """``[A, B]`` unsigned numbers -> ``[A, B * bits / 32]`` int32."""
    per = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per)).numpy().astype(np.uint32)
    out = np.zeros((len(padded), padded.shape[1] // per), dtype=np.uint32)
    for number, place in enumerate(places or range(per)):
        out |= padded[:, number::per] << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


class Rounded:
    """A random matrix ``[N, K]`` of ``scale * (code - zero)``."""

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        bits: int = 4,
        group: int = 32,
        zero: int | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        """``zero``: the same for all groups; None: each has its own. ``order``: the group of each input."""
        generator = torch.Generator().manual_seed(rows + columns)
        count = -(-columns // group)
        self.bits = bits
        self.codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
        self.scales = (torch.rand(rows, count, generator=generator) + 0.5).mul(0.01).half()
        self.zeros = torch.randint(0, 2**bits, (rows, count), generator=generator)
        if zero is not None:
            self.zeros.fill_(zero)
        self.order = torch.arange(columns) // group if order is None else order
        zeros, scales = (values[:, self.order].float() for values in (self.zeros, self.scales))
        self.meant = (self.codes.float() - zeros) * scales

    def gptq(self, less: int = 1, *, g_idx: bool = True) -> dict[str, torch.Tensor]:
        """``less``: what is taken from zero points before they are stored."""
        stored = {
            "qweight": words(self.codes, self.bits).T.contiguous(),
            "qzeros": words((self.zeros.T - less) % 2**self.bits, self.bits),
            "scales": self.scales.T.contiguous(),
        }
        return stored | ({"g_idx": self.order.int()} if g_idx else {})

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.codes.T, 4, AWQ_PLACES),
            "qzeros": words(self.zeros.T, 4, AWQ_PLACES),
            "scales": self.scales.T.contiguous(),
        }
