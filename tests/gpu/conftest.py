"""Whole engines on a device: always on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .tiny import MODELS, write_family

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


def pytest_configure(config: pytest.Config) -> None:
    # A GPU host may be without the plugin that knows it.
    config.addinivalue_line("markers", "timeout: seconds that a test may take, for pytest-timeout")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model, written once."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def folder(family: str) -> Path:
        return write_family(root / family.replace(" ", "-").replace(",", ""), **MODELS[family])

    return folder


@pytest.fixture(scope="session")
def report() -> Callable[[str, dict[str, Any]], None]:
    """Writes what a test measured to GPU_REPORTS, if that names a folder."""

    def write(name: str, data: dict[str, Any]) -> None:
        if place := os.environ.get("GPU_REPORTS"):
            Path(place).mkdir(parents=True, exist_ok=True)
            (Path(place) / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")

    return write
