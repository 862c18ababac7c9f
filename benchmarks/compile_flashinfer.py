"""Compiles the FlashInfer kernels that models need, and prints the seconds of each.

    python benchmarks/compile_flashinfer.py MODEL...

A model is a folder with a config.json. Nothing runs on the GPU. Run this before measuring: a compiler in the
background takes cores from the engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace.attention import select  # noqa: E402
from headrace.config import EngineArgs  # noqa: E402
from headrace.model_spec import AttentionSpec  # noqa: E402
from headrace.models.implementation import choose  # noqa: E402
from headrace.sources.files import find_model  # noqa: E402

DEVICE, DTYPE = "cuda", "bfloat16"


def layers(folder: Path) -> Sequence[AttentionSpec]:
    args = EngineArgs(model=str(folder), load_format="dummy")
    return choose(args, find_model(args)).spec.layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with a config.json")
    options = parser.parse_args()
    specs = [spec for folder in options.models for spec in layers(folder)]
    backends = [select.choose(spec, DEVICE, DTYPE).name for spec in specs]
    kernels = select.begin_compiling(specs, backends, DEVICE, DTYPE)
    for kernel in kernels:
        kernel.join(None)
        print(kernel.outcome, flush=True)
    if not kernels:
        print("no layer of these models is FlashInfer's")
    if not all(kernel.ready for kernel in kernels):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
