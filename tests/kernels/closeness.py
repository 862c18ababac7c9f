"""Tolerances between a kernel and its reference."""

from __future__ import annotations

import torch

STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The largest step between neighbours, relative; of float32 several, because sums are taken in another order."""


FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-5}
"""Absolute: float16 has few digits below 6e-5."""


def close(got: torch.Tensor, expected: torch.Tensor, steps: float = 1) -> None:
    """Equal up to some ``steps`` of the type.

    A device rounds to the nearest, so that two results of one formula differ by a step at most. The interpreter cuts
    bfloat16 off instead, each time that it rounds.
    """
    if got.device.type == "cpu" and got.dtype == torch.bfloat16:
        steps *= 3
    torch.testing.assert_close(
        got.cpu(), expected.to(got.dtype).cpu(), atol=FLOOR[got.dtype], rtol=1.01 * steps * STEP[got.dtype]
    )
