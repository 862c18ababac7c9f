"""bad_words: bans tokens that would complete a bad word in the emitted text.

Each slot that uses the feature advances its own byte automaton (``BadWordsTable``) on the device. One table holds the
automatons of all slots; a state's index there is the slot's first index plus the state.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence
from headrace.core.request import BadWordsTable
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Feature, Indices, LogitsRows, take_rows
from headrace.sampling.slot_masks import SlotMasks
from headrace.text.vocab import TokenBytes


class BadWords(Feature):
    """The samples of a request share their automaton."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, token_bytes: TokenBytes | None) -> None:
        super().__init__(num_slots)
        self._vocab_size = vocab_size
        self._device = device
        self._masks = SlotMasks(num_slots, vocab_size, device, "bad_words")
        """Tokens that are banned in every state."""
        self._token_bytes = token_bytes
        self._texts: _Texts | None = None
        self._automatons: dict[int, _SlotAutomaton] = {}
        self._tables: _Tables | None = None
        """The automatons of all slots; None: rebuild, a slot's automaton has changed."""
        self._state = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """slot -> state within the slot's own automaton, after the outputs so far."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.bad_words is None or self._token_bytes is None:
            return False
        if self._texts is None:
            self._texts = _Texts(self._token_bytes, self._vocab_size, self._device)
        shared = (automaton for automaton in self._automatons.values() if automaton.table is seq.bad_words)
        automaton = next(shared, None) or _SlotAutomaton.of(seq.bad_words)
        self._masks.put(slot, seq.bad_words.always, allowed=False)
        self._automatons[slot] = automaton
        self.use(slot)
        self._tables = None
        pieces = self._token_bytes.pieces if automaton.special_text else self._token_bytes.visible
        outputs = seq.token_ids[seq.prompt_len :]
        self._state[slot] = automaton.state_after(b"".join(pieces[token] for token in outputs if token < len(pieces)))
        return True

    def remove(self, slot: int) -> None:
        super().remove(slot)
        if self._automatons.pop(slot, None) is not None:
            self._tables = None
        if not self._automatons:
            self._masks.forget()

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        slots = rows.slots[users]
        flat = logits.view(-1)
        self._masks.apply(logits, users, slots)
        tables = self._current_tables()
        lengths = tables.most_banned[slots]
        total = int(lengths.sum())
        if not total:
            return True
        # Only the device knows how many tokens a row's state bans: each row gets places for the maximum over its states.
        row = torch.arange(len(users), device=self._device).repeat_interleave(upload(lengths, self._device), output_size=total)
        nth = torch.arange(total, device=self._device) - upload(np.cumsum(lengths) - lengths, self._device)[row]
        states = self._state[upload(slots, self._device)]
        for draft in rows.drafts_before(users).unbind(1):
            states = torch.where(draft < 0, states, self._after(slots, states, draft.clamp(min=0)))
        states = (states + upload(tables.first_state[slots], self._device))[row]
        start, count = tables.ban_starts[states], tables.ban_starts[states + 1] - tables.ban_starts[states]
        banned = nth < count
        tokens = tables.bans[(start + nth).masked_fill(~banned, 0)]
        # Surplus places add 0; an addition, unlike an assignment, may name a place twice.
        values = torch.zeros(total, device=self._device).masked_fill_(banned, -torch.inf)
        flat.index_add_(0, upload(users, self._device)[row] * self._vocab_size + tokens, values)
        return True

    def update(self, rows: LogitsRows, users: Indices, tokens: torch.Tensor, kept: torch.Tensor | None) -> None:
        for nth in range(rows.nth[users].max() + 1):
            picked = users[rows.nth[users] == nth]
            slots = rows.slots[picked]
            slots_device = upload(slots, self._device)
            before = self._state[slots_device]
            after = self._after(slots, before, take_rows(tokens, picked))
            if kept is not None:
                after = torch.where(take_rows(kept, picked), after, before)
            self._state.index_copy_(0, slots_device, after)

    def _after(self, slots: Indices, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the states of the slots' automatons after one more token each. Index space: that of ``slots``."""
        if self._texts is None:
            return state
        tables = self._current_tables()
        first = upload(tables.first_state[slots], self._device)
        shows_special = upload(tables.special_text[slots], self._device)
        depth = int(tables.depth[slots].max())
        ends, lengths = self._texts.of(tokens, shows_special)
        # A state is a suffix of the text, so bytes further back than the longest word do not affect it.
        state = state.masked_fill(lengths > depth, 0)
        for back in range(min(depth, self._texts.longest), 0, -1):
            byte = self._texts.blob[(ends - back).clamp_(min=0)].long()
            after = tables.transitions[(first + state) * 256 + byte].long()
            state = torch.where(lengths >= back, after, state)
        return state

    def _current_tables(self) -> _Tables:
        if self._tables is None:
            self._tables = _Tables(self._automatons, len(self._state), self._device)
        return self._tables


@dataclasses.dataclass(frozen=True, eq=False)
class _SlotAutomaton:
    """The automaton of one request, on the host. Its states start at 0."""

    table: BadWordsTable
    transitions: npt.NDArray[np.int16]
    """``[states, 256]``"""
    bans: npt.NDArray[np.int64]
    ban_starts: npt.NDArray[np.int64]
    """``[states + 1]``: state s bans ``bans[ban_starts[s] : ban_starts[s + 1]]``, in addition to the tokens always banned."""
    depth: int
    """Length in bytes of the longest suffix that a state stands for."""
    special_text: bool

    @classmethod
    def of(cls, table: BadWordsTable) -> _SlotAutomaton:
        bans = np.fromiter(itertools.chain.from_iterable(table.by_state), dtype=np.int64)
        starts = np.cumsum([0, *map(len, table.by_state)])
        transitions = np.frombuffer(table.transitions, dtype="<i2").reshape(table.num_states, 256).astype(np.int16)
        return cls(table, transitions, bans, starts, _depth(transitions), table.special_text)

    def state_after(self, text: bytes) -> int:
        """State that ``text`` leads to from the start."""
        state = 0
        for byte in text[max(0, len(text) - self.depth) :]:
            state = int(self.transitions[state, byte])
        return state


def _depth(transitions: npt.NDArray[np.int16]) -> int:
    """Largest distance of a state from the start, in bytes."""
    seen = {0}
    level, depth = [0], 0
    while level:
        following = {int(state) for state in np.unique(transitions[level])} - seen
        seen |= following
        level = list(following)
        depth += bool(level)
    return depth


class _Tables:
    """The automatons of all slots, each once, concatenated. Rebuilt when a slot gains or loses one."""

    def __init__(self, automatons: dict[int, _SlotAutomaton], num_slots: int, device: torch.device) -> None:
        # Index space: slot.
        self.first_state = np.zeros(num_slots, dtype=np.int64)
        self.most_banned = np.zeros(num_slots, dtype=np.int64)
        self.depth = np.zeros(num_slots, dtype=np.int64)
        self.special_text = np.zeros(num_slots, dtype=np.int64)
        states = num_bans = 0
        starts = []
        places: dict[_SlotAutomaton, int] = {}
        for slot, automaton in automatons.items():
            known = automaton in places
            self.first_state[slot] = places.setdefault(automaton, states)
            self.most_banned[slot] = np.diff(automaton.ban_starts).max()
            self.depth[slot] = automaton.depth
            self.special_text[slot] = automaton.special_text
            if known:
                continue
            starts.append(automaton.ban_starts[:-1] + num_bans)
            states += len(automaton.transitions)
            num_bans += len(automaton.bans)
        # Index space: state of the concatenated table.
        self.transitions = upload(np.concatenate([a.transitions for a in places]).ravel(), device)
        """``[states * 256]`` int16: next states, numbered within their automaton."""
        self.ban_starts = upload(np.concatenate([*starts, [num_bans]]), device)
        """``[states + 1]`` int64"""
        self.bans = upload(np.concatenate([a.bans for a in places]), device)
        """Token ids, ``[bans]`` int64"""


class _Texts:
    """The bytes of all tokens, concatenated on the device."""

    def __init__(self, token_bytes: TokenBytes, vocab_size: int, device: torch.device) -> None:
        missing = [b""] * (vocab_size - len(token_bytes.pieces))
        pieces = [*token_bytes.pieces[:vocab_size], *missing]
        shown = np.array([len(piece) for piece in pieces], dtype=np.int64)
        hidden = shown.copy()
        hidden[[token for token in token_bytes.special if token < vocab_size]] = 0
        self.longest = int(shown.max(initial=0))
        self.blob = upload(np.frombuffer(b"".join(pieces) + b"\0", dtype=np.uint8).copy(), device)
        self._ends = upload(np.cumsum(shown), device)
        self._lengths = upload(np.stack((hidden, shown)), device)
        """``[2, vocab]``: bytes of each token's text; in row 0 special tokens have no text."""

    def of(self, tokens: torch.Tensor, shows_special: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """End of each token's bytes in ``blob``, and their number."""
        return self._ends[tokens], self._lengths[shows_special, tokens]
