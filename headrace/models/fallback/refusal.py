"""Unfit: why a foreign model cannot run here, and which of its modules is the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headrace.errors import ConfigError


class Unfit(Exception):
    """A foreign model needs something that headrace does not support.

    Args:
        reason: to be read after the module's path.
        path: of the module; empty: the whole model.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason = reason
        self.path = path


class BrokenModel(Unfit):
    """The model's code failed in a trace: the fault may lie in the way it was called."""


@contextlib.contextmanager
def refusals_as_errors(architecture: str, library: str = "transformers") -> Iterator[None]:
    """Converts Unfit to ConfigError."""
    try:
        yield
    except Unfit as refusal:
        raise ConfigError(f"{architecture} cannot run through {library}: {refusal}", "model_impl") from refusal
