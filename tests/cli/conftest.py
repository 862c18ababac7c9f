"""The command line, built once: that takes twenty times as long as parsing one line."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.testing


@pytest.fixture(scope="package", autouse=True)
def built_once() -> Iterator[None]:
    """Typer's runner builds all commands for every line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield
