"""Plain reference of the bad_words automaton."""

from __future__ import annotations

import numpy as np

from headrace.core.request import BadWordsTable
from headrace.text.vocab import TokenBytes


class BadWordsStepper:
    """Follows a table token by token: the reference of the sampler's bad_words feature."""

    def __init__(self, table: BadWordsTable, token_bytes: TokenBytes) -> None:
        self._table = table
        self._pieces = token_bytes.pieces if table.special_text else token_bytes.visible
        self._transitions = np.frombuffer(table.transitions, dtype="<i2").reshape(table.num_states, 256)
        self.state = 0

    def banned(self) -> set[int]:
        """Tokens banned at the next position."""
        return {*self._table.always, *self._table.by_state[self.state]}

    def push(self, token: int) -> None:
        """Appends a token to the output."""
        for byte in self._pieces[token]:
            self.state = int(self._transitions[self.state, byte])
