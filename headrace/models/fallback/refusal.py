"""Refusal: why a foreign model cannot run here, and which of its modules is the reason."""

from __future__ import annotations

from headrace.errors import ConfigError


class Refusal(Exception):
    """A foreign model asks for something that headrace does not do.

    Args:
        reason: to be read after the module's path.
        path: of the module; empty: the whole model.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason = reason
        self.path = path

    def as_error(self, architecture: str, library: str = "transformers") -> ConfigError:
        """For whoever asked for the model."""
        return ConfigError(f"{architecture} cannot run through {library}: {self}", "model_impl")


class Broken(Refusal):
    """Its code failed where it was looked at: the fault may lie in the way it was called."""
