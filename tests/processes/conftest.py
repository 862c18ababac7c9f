"""Engines that tests of this folder share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engine.fixtures import text, tiny_folder

from headrace.frontend.async_llm import AsyncLLM
from processes.async_engine import Shared, build

__all__ = ["text", "tiny_folder"]


@pytest.fixture
def make(tiny_folder: Path) -> Callable[..., AsyncLLM]:
    return functools.partial(build, tiny_folder)


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Iterator[Shared]:
    one = Shared(build(tiny_folder, "prompts", seconds=0.01))
    yield one
    one.close()
