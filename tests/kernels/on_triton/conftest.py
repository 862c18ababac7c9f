"""Kernels that need Triton, which there is for Linux only, are left out elsewhere. Interpreted ones are watched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from headrace.kernels import support

HERE = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HERE else ["test_*"]


@pytest.fixture(autouse=True)
def no_access_out_of_bounds() -> Iterator[None]:
    if HERE and support.interpreted():
        from .memory import Checker

        with Checker().on():
            yield
    else:
        yield
