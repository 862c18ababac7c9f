"""StepPlan and StepResult: the only contract between scheduler and runner.

A plan is immutable and serialisable (``encode_plan`` / ``decode_plan``). The runner's state is a function of the
stream of plans, so a recorded stream can be replayed. New sequences come in full, running ones as what changed.
"""

from __future__ import annotations

import msgspec

from headrace.core.request import BadWordsTable
from headrace.outputs import TokenLogprobs
from headrace.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a slot: new, or resumed after preemption (then ``token_ids`` holds its outputs too)."""

    seq_id: int
    slot: int
    token_ids: list[int]
    """Everything known: prompt, then outputs."""
    prompt_len: int
    """``token_ids[prompt_len:]`` are outputs: penalties treat only those as generated."""
    sampling: SamplingParams
    seed: int
    sample_index: int
    """With ``seed`` and the position, the key of every random number drawn for this sequence."""
    eos_token_ids: list[int]
    bad_words: BadWordsTable | None


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence in this step: computes tokens ``[num_computed, num_computed + num_tokens)``."""

    seq_id: int
    slot: int
    num_computed: int
    """Tokens whose KV is in the cache before this step (an upper bound where speculation may roll back)."""
    num_tokens: int
    samples: bool
    """True if the last computed token is the sequence's last known one, so that a next token is drawn."""
    new_blocks: tuple[tuple[int, ...], ...]
    """Per cache group, the blocks to append to the slot's table."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What to do in one step. May be empty. Applied in order: ``moves``, ``released``, ``new``, ``rows``."""

    step: int
    released: tuple[int, ...]
    """Slots whose sequence is gone (finished, aborted or preempted) since the last plan."""
    new: tuple[NewSequence, ...]
    rows: tuple[Row, ...]
    """Decode rows first, then prefill rows: the one order that every index of the step uses."""
    num_decode_rows: int
    """Rows past their prefill. A one-token last chunk of a prompt is prefill."""
    moves: tuple[tuple[int, int, int], ...] = ()
    """Cache group, from, to: one after the other, the content of a block is copied to another, which takes its place in every
    block table. Rows have the new numbers already. Steps launched before may still write the old places, so that the copies
    come after those steps; and the old places may belong to any group now."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What came back from one step, tagged with the sequences it belongs to."""

    step: int
    seq_ids: list[int]
    """The sequences of the rows that sampled, in row order."""
    token_ids: list[list[int]]
    """Per entry of ``seq_ids``, 0 to 1 + K tokens."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """seq_id -> an entry a sampled token, for sequences that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """seq_id -> entries for the prompt tokens ``num_computed + 1 ...`` of this step's chunk, for sequences that asked."""
    errors: dict[int, str] = {}
    """seq_id -> why this sequence, and it alone, cannot go on."""
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    replayed: bool | None = None
    """The model ran as a CUDA graph, or kernel by kernel; None: it did not run."""
    padding_tokens: int = 0
    """Tokens of nobody's that it computed, because a graph has room for more than there were."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    return _decoder.decode(data)
