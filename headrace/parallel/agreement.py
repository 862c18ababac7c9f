"""Agreement between processes that run the same engine: decisions from local observations must be equal."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """Every process calls the same methods in the same order; each call waits for all of them."""

    size: int

    def any(self, flag: bool) -> bool:
        """Whether it is set in any process."""
        return self.least(-int(flag)) < 0

    def least(self, number: int) -> int:
        """The least number of all processes."""
        ...

    def alike(self, value: bytes) -> bool:
        """Whether all processes have the same value."""
        ...


class OneProcess(Agreement):
    """One process."""

    size = 1

    def least(self, number: int) -> int:
        return number

    def alike(self, value: bytes) -> bool:
        return True
