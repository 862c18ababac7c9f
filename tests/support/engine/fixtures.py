"""Fixtures that the tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineArgs
from headrace.startup.text import ModelText, load_text
from support.models.tiny_llama import write_config


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a tiny model."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def text(tiny_folder: Path) -> ModelText:
    return load_text(EngineArgs(model=str(tiny_folder), load_format="dummy"))
