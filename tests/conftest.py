"""Settings that must precede the import of torch, and the device of kernels.

Triton kernels are compiled where there is a CUDA device, else run by Triton's interpreter on the CPU.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator

# Test processes run side by side, so that one thread each is the quickest; and sums are split up alike on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for more: threads that spin while they wait would take the processors from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Triton asks for it when it is imported, and libraries import it, so it must be said before anything else.
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        from support.interpreter import install

        install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps imported modules and collected tests, which live as long as the process, out of garbage collection.

    With them, each full collection that a test or the engine asks for takes about a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def seed() -> None:
    """A test that draws without a generator of its own draws the same numbers in every run."""
    if CUDA:
        torch.manual_seed(0)
    else:
        # For a device that is not there, torch.manual_seed keeps a stack trace, which takes longer than many tests.
        torch.default_generator.manual_seed(0)


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device that runs a kernel. One process does either the one or the other."""
    if (request.param == "cuda") != CUDA:
        pytest.skip("there is a CUDA device: kernels are compiled" if CUDA else "there is no CUDA device")
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Takes SIGINT: a process that a shell has started in the background ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
