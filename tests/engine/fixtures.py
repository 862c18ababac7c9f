"""Fixtures that the tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.tiny import write_config
from headrace.config import EngineArgs
from headrace.frontend.frontend import Frontend, load_frontend


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a tiny model."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def frontend(tiny_folder: Path) -> Frontend:
    return load_frontend(EngineArgs(model=str(tiny_folder), load_format="dummy"))
