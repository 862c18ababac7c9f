"""Every operation of a deterministic step: a row comes out bitwise the same alone, in a batch of any size and in any place.

Where ``deterministic`` fails on a GPU, what fails here says which operation is at fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.sampling.logprobs import measure

from .operations import POOL, Maker, Operation, Tensors, operations

# The interpreter computes by numpy, which says so when a number overflows or is none.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")

DTYPES = ["float32", "bfloat16"]
SIZES = (1, 2, 3, 5, 17, 33, 64)
NAMES = [name for name, _ in operations(Maker(torch.float32, torch.device("cpu")))]
SLOW = ("full width", "2048", "biases", "experts, ", "draws", "attention, decode", "attention, prompt", "3 of 80", "chosen")
"""Cases that are slow in the interpreter; they are cut up as others are."""


QUICK = ("norm of 100", "gate, silu", "product of odd sizes")
"""Cases that run in bfloat16 too, which has no separate kernels anywhere."""


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def aside(x: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins ``by`` numbers behind an address that a GPU likes."""
    held = torch.empty(x.numel() + by, dtype=x.dtype, device=x.device)
    return held[by:].view(x.shape).copy_(x)


def check(operation: Operation, sizes: tuple[int, ...] = SIZES, pool: int = POOL) -> None:
    whole = operation.run(*(aside(rows[:pool], 0) for rows in operation.rows))
    faults = []
    for size in sizes:
        for start, by in ((0, 0), (1, 0), (pool // 2 - size // 2, 1), (pool - size, 2)):
            some = [aside(rows[start : start + size], by) for rows in operation.rows]
            for number, (got, all_of_it) in enumerate(zip(operation.run(*some), whole, strict=True)):
                wanted = all_of_it[start : start + size]
                if not torch.equal(bits(got), bits(wanted)):
                    rows = (got != wanted).reshape(size, -1).any(-1).nonzero().flatten().tolist()
                    apart = (got.double() - wanted.double()).abs().max().item()
                    faults.append(f"result {number}, rows {start} to {start + size}, {by} aside: {rows} differ by {apart:.2g}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.float32, id=f"{name}-float32") for name in NAMES),
        *(
            pytest.param(name, torch.bfloat16, id=f"{name}-bfloat16", marks=() if name in QUICK else pytest.mark.slow)
            for name in NAMES
        ),
    ],
)
def test_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    interpreted = device.type == "cpu"
    if interpreted and any(part in name for part in SLOW):
        pytest.skip("the interpreter takes its time, and other cases are like this one")
    check(dict(operations(Maker(dtype, device)))[name](), *(((1, 3, 17), 20) if interpreted else (SIZES, POOL)))


def test_a_difference_is_found(device: torch.device) -> None:
    """The difference is one bit, in one row, where the row is alone."""
    make = Maker(torch.float32, device)

    def run(x: torch.Tensor) -> Tensors:
        if len(x) > 1:
            return (x.clone(),)
        return ((x.view(torch.int32) ^ 1).view(torch.float32),)

    with pytest.raises(AssertionError, match=r"result 0, rows 69 to 70, 2 aside: \[0\] differ"):
        check(Operation((make.random(POOL, 8),), run), (1, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("count", [0, 1, 5, -1])
@pytest.mark.parametrize("vocab", [303, 5003, 50_304])
def test_logprobs(vocab: int, count: int) -> None:
    make = Maker(torch.float32, torch.device("cuda"))
    if count < 0 and vocab > 10_000:
        pytest.skip("all of so many rows are not needed")

    def run(logits: torch.Tensor, tokens: torch.Tensor) -> Tensors:
        found = measure(logits, tokens, count)
        return found.logprobs, found.ranks, found.best_tokens, found.best_logprobs

    check(Operation((make.random(POOL, vocab), make.whole(0, vocab, POOL)), run))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_pytorch_does_with_one_number_at_a_time(dtype: torch.dtype) -> None:
    """Gates of attention's output, soft caps of logits, scaled embeddings, sums of shared and other experts."""
    make = Maker(dtype, torch.device("cuda"))

    def run(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return x * torch.sigmoid(y), 30.0 * torch.tanh(x.float() / 30.0), x + y, x * 11.3

    check(Operation((make.random(POOL, 101), make.random(POOL, 101)), run))


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what ``compile_variants`` prints of both types: kernels that do not depend on it are compiled once."""
    script = Path(__file__).with_name("compile_variants.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("variants"))
    command = [sys.executable, str(script), *DTYPES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_variants_of_a_kernel_sum_up_alike(dtype: str, variants: list[dict[str, Any]]) -> None:
    """A kernel is compiled anew for addresses and numbers that are not multiples of 16; on a GPU that need not be there."""
    ways: dict[tuple[str, str], set[str]] = defaultdict(set)
    for found in variants:
        if found["dtype"] == dtype:
            ways[found["operation"], found["kernel"]].add(json.dumps(found["sums"]))
    assert {operation for operation, _ in ways} == set(NAMES) - {"embedding"}
    assert any("dot" in sums for own in ways.values() for sums in own)
    assert not {kernel: own for kernel, own in ways.items() if len(own) > 1}
