"""Every kernel compiles for a Hopper GPU, asks for no more shared memory than that has, and waits for the kernel before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAPABILITY, SHARED = 90, 227 << 10
"""And the bytes of shared memory that a program may have. The script does other generations too, which takes its time."""


READ_AHEAD = {
    *("_single", "_several", "_fp8_single", "_fp8_few", "_fp8_wide", "_scale", "_packed_few", "_packed_floats"),
    *("_router_logits", "_peer_sum", "_shrink", "_expand", "_conv_rows", "_delta_rule", "_kept_rule", "_invariant_product"),
    *("_rms_norm", "_attend", "_expand_one", "_expand_gated"),
}
FETCH_AHEAD = {"_invariant_product"}
"""Kernels that begin with what no kernel of the step writes, a weight or a state: read it, or fetch it into the L2 cache."""
ALONE = {"_reshape_and_cache"}
"""Launched when the kernel before is complete."""


PARTS = {"attention": 8, "products": 14, "experts": 8, "sparse": 9, "rest": 46}
"""Kernels of each part."""


def compiled(part: str, cache: Path) -> list[dict[str, Any]]:
    """Returns the records that the script prints."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(script), str(CAPABILITY), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_compiles(part: str, tmp_path: Path) -> None:
    lines = compiled(part, tmp_path)
    assert len({line["kernel"] for line in lines}) == PARTS[part]
    for line in lines:
        assert line["shared"] <= SHARED, line
        # That a kernel is complete stands for all before it only if each of its programs waits, whatever way it takes.
        alone = line["kernel"] in ALONE
        assert (line["early"], line["waits"]) == (not alone, 0 if alone else 1), line
        allowed = {"ld.global"} if line["kernel"] in READ_AHEAD else set()
        allowed |= {"cp.async.bulk.prefetch"} if line["kernel"] in FETCH_AHEAD else set()
        assert set(line["ahead"]) <= allowed, line
    # See ``tiling.cut``.
    attention = [(line["widths"], line["asynchronous"]) for line in lines if "widths" in line]
    if part in ("attention", "sparse"):
        assert ([128, 128], True) in attention and ([32, 20], True) not in attention
    if part == "attention":
        assert ([32, 20], False) in attention
    if part == "rest":
        # Sums of eight warps, 16 rows and 8 outputs: the factors of a product of few rows do not go by way of shared memory.
        assert {line["shared"] for line in lines if line["kernel"] == "_several"} == {8 * 16 * 8 * 4}
    if part == "products":
        # Nor do codes, to one sort of matrix units or to the other.
        assert {line["shared"] for line in lines if line["kernel"] == "_packed_few"} == {4 * 16 * 8 * 4}
        assert all(line["asynchronous"] for line in lines if line["kernel"] == "_packed_many")
