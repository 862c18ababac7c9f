"""Compiles one kernel for a GPU that is not here, and prints whether Triton found it compiled.

python compile_one.py export FILE      # and writes a bundle with it; import FILE: reads one before
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.kernels.activation.triton import _opened
from headrace.startup.kernel_bundle import Caches, export, install, this_machine


def main() -> None:
    step, bundle = sys.argv[1], Path(sys.argv[2])
    machine, caches = msgspec.structs.replace(this_machine(), architecture="sm90"), Caches(Path(knobs.cache.dir), None)
    if step == "import":
        with bundle.open("rb") as file:
            install(file, machine, caches)
    found: list[bool] = []

    def listen(**facts: Any) -> None:
        found.append(facts["cache_hit"])

    knobs.compilation.listener = listen
    pointers = dict.fromkeys(("x", "gate", "out"), "*bf16")
    constants = {"WIDTH": 64, "BLOCK": 64, "PDL": False}
    signature = pointers | {"x_row": "i64", "gate_row": "i64"} | dict.fromkeys(constants, "constexpr")
    triton.compile(ASTSource(_opened._function, signature, constants), target=GPUTarget("cuda", 90, 32))
    print("found" if found == [True] else "compiled")
    if step == "export":
        bundle.write_bytes(export(machine, caches)[0])


if __name__ == "__main__":
    main()
