"""Compiles the kernels of each operation for a Hopper GPU that need not be there, for rows alone and in company, at addresses
that are multiples of 16 and at others; no further than to Triton's own representation, which is where the order of sums is
settled: the compiler behind it may not change it, and ``compile_kernels`` goes all the way.

    python compile_variants.py float32 bfloat16

prints a JSON line for each launch: the type, the operation, the kernel, and how it sums up: its sums, scans and products of
floats with the layouts of what goes into them.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

sys.path.insert(0, __file__.rpartition("/kernels/")[0])

from kernels.compile_kernels import Target
from kernels.operations import POOL, Maker, operations

CAPABILITY = 90
_NAMES = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_REDUCTION = re.compile(r'"tt\.(reduce|scan)"\(.*?\n(.*?)\n\s*\}\) : \((.*?)\) ->', re.DOTALL)
_PRODUCT = re.compile(r"(tt\.dot|ttng\.warp_group_dot) .*-> (tensor<\S+(?: = \S+)?.*?>)(?: loc.*)?$", re.MULTILINE)
"""A product with its result: that shows the instruction, while factors may be in one memory or another."""


def sums_of(ttgir: str) -> list[str]:
    """Maxima and sums of integers are the same in any order."""
    names = dict(_NAMES.findall(ttgir))
    found = [(match.start(), f"{match[1]} {match[3]}") for match in _REDUCTION.finditer(ttgir) if "addf" in match[2]]
    found += [(match.start(), f"{match[1]} {match[2]}") for match in _PRODUCT.finditer(ttgir)]
    return [re.sub(r"#\w+", lambda name: names.get(name[0], name[0]), text) for _, text in sorted(found)]


def aside(x: torch.Tensor, by: int) -> torch.Tensor:
    held = torch.zeros(x.numel() + by, dtype=x.dtype)
    return held[by:].view(x.shape).copy_(x)


def no_further(*asked: Any) -> tuple[str, str]:
    """Triton's hook for who changes the stages of a compilation; without arguments it is asked for what tells caches apart."""
    if asked:
        _, stages, *_ = asked
        for stage in set(stages) - {"ttir", "ttgir"}:
            del stages[stage]
        stages["cubin"] = nothing
    return "no further than ttgir", "no further than ttgir"


def nothing(module: Any, metadata: dict[str, Any]) -> bytes:
    """Returns no code, and the metadata that Triton needs of it."""
    metadata |= {"name": "none", "shared": 0}
    return b""


def main(dtypes: list[str]) -> None:
    triton.runtime.driver.set_active(Target(CAPABILITY))
    triton.knobs.runtime.add_stages_inspection_hook = no_further
    run: Callable[..., Any] = JITFunction.run
    current: dict[str, str] = {}

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        sums = sums_of(kernel.asm["ttgir"])
        print(json.dumps(current | {"kernel": self.fn.__name__, "sums": sums}), flush=True)

    JITFunction.run = compiled
    for dtype in dtypes:
        for name, make in operations(Maker(getattr(torch, dtype), torch.device("cpu"))):
            current |= {"dtype": dtype, "operation": name}
            operation = make()
            for start, size, by in ((0, POOL, 0), (0, 1, 0), (1, 1, 1), (3, 17, 1), (0, 16, 2), (5, 33, 4)):
                # What was never computed may be no index.
                with contextlib.suppress(IndexError):
                    operation.run(*(aside(rows[start : start + size], by) for rows in operation.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
