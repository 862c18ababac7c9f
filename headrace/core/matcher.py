"""Matcher: what the scheduler knows of a constraint on the output of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TOO_COMPLEX = "grammar_too_complex"
"""Code of errors that a limit on a grammar's work causes, and the beginning of their messages."""
Mask = npt.NDArray[np.int32]
"""``[ceil(vocab_size / 32)]``: a set bit allows the token."""


class Matcher(Protocol):
    """The state of one sequence's constraint after its known outputs. Tokens that end a sequence are not part of it."""

    def fill(self, mask: Mask) -> str | None:
        """Writes the tokens that may come next. Returns why the matcher cannot go on, or None."""
        ...

    def advance(self, token_ids: Sequence[int]) -> str | None:
        """Takes in outputs. Returns why one of them is refused, or None."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last outputs."""
        ...

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    @property
    def ended(self) -> bool:
        """The outputs are complete, and no token can follow."""
        ...

    @property
    def stuck(self) -> bool:
        """The last outputs repeat themselves where a constraint lets them do so without end."""
        ...

    @property
    def accepting(self) -> bool:
        """The outputs are complete as they are."""
        ...
