"""StepPlan, SamplePlan and StepResult: the only contract between scheduler and runner.

Plans are immutable and serialisable (``encode_plan`` / ``decode_plan``). The runner's state is a function of the
stream of plans, so a recorded stream can be replayed. Plans carry new sequences in full, and changes of running ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from headrace.core.media import ItemInputs, RopePositions
from headrace.core.request import BadWordsTable
from headrace.kv import Item, StateOp
from headrace.outputs import Failure, TokenLogprobs
from headrace.pooling_params import PoolingParams
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    Tokens = array[int]
else:  # Python 3.11 has no array[int].
    Tokens = array


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a slot: new, or resumed after preemption (then ``token_ids`` holds its outputs too)."""

    seq_id: int
    slot: int
    token_ids: Tokens
    """Prompt tokens, then known outputs: int32 (``pack_tokens``), which are bytes in an encoded plan."""
    prompt_len: int
    """``token_ids[prompt_len:]`` are outputs: penalties treat only those as generated."""
    sampling: SamplingParams
    seed: int
    sample_index: int
    """Index of the sample in its request: with ``seed`` and the position, the key of each of the sequence's random numbers."""
    eos_token_ids: list[int]
    bad_words: BadWordsTable | None
    constrained: bool = False
    """Each of its logits rows needs a mask."""
    items: tuple[Item, ...] = ()
    """Items that end behind the cached prefix, with features to be computed or added."""
    media: tuple[ItemInputs, ...] = ()
    """The content of each of ``items``."""
    rope: RopePositions | None = None
    sparse: bytes | None = None
    """None: its prompt attends densely. Else the classes that the model's router gave to its heads, where they are known;
    empty: they are not, or there is no router."""
    state: int = 0
    """Its state block; 0: the model has no state layers."""
    pooling: PoolingParams | None = None
    """Its rows have no logits, and the one that ends the prompt returns ``StepResult.pooled``; None: it generates tokens."""
    adapter: str | None = None
    """``AdapterFiles.digest``; None: the base model."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence in this step: computes tokens ``[num_computed, num_computed + num_tokens)``."""

    seq_id: int
    slot: int
    num_computed: int
    """Tokens whose KV is in the cache before this step: an upper bound while a step in flight may return fewer tokens than it
    has logits rows. The device keeps the exact number."""
    num_tokens: int
    num_logits: int
    """Logits rows: the row's last ``num_logits`` tokens get logits, and the row returns 0 to ``num_logits`` tokens. The first
    of them is the sequence's last known token, the others are drafts. 0: a prompt chunk that is not the last one, or of a
    prompt that is pooled, which samples nothing."""
    new_blocks: tuple[tuple[int, ...], ...]
    """Per cache group, the blocks to append to the slot's block table."""
    drafts: tuple[int, ...] = ()
    """The row's last tokens, which the runner writes to the slot: ``num_logits - 1`` of them, and then ``num_computed`` is
    exact. Empty: the row has no drafts, or the slot holds them already."""


class LayerRange(msgspec.Struct, frozen=True, array_like=True):
    """A range of the model's layers, ``[first, end)`` of ``total``: a step's share of a piece (``SparsePrompt.whole``)."""

    first: int
    end: int
    total: int

    @property
    def last(self) -> bool:
        """Whether the piece is complete after them."""
        return self.end == self.total

    def share(self, num_tokens: int) -> int:
        """Returns the layers' part of the piece's tokens, such that the shares of all its steps add up to ``num_tokens``."""
        return num_tokens * self.end // self.total - num_tokens * self.first // self.total


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The work of one step; may be empty. The runner applies ``moves``, ``released``, ``new``, ``state_before``, ``rows`` and
    ``state_after`` in this order."""

    step: int
    released: tuple[int, ...]
    """Slots whose sequence finished, was aborted or was preempted since the last plan."""
    new: tuple[NewSequence, ...]
    rows: tuple[Row, ...]
    """Decode rows first, then prefill rows, last those that attend sparsely: every row index of the step refers to this
    order."""
    num_decode_rows: int
    """Rows past their prefill. The last chunk of a prompt is prefill even if it has one token."""
    moves: tuple[tuple[int, int, int], ...] = ()
    """(cache group, source block, target block), executed in order: the content is copied, and the target replaces the source
    in every block table. ``rows`` have the new numbers already. Steps launched before may still write the sources, so the
    copies run after them; the bytes of a source may belong to another group from this step on."""
    layers: LayerRange | None = None
    """The last row computes only these layers, apart from the other rows. It is a row of several plans, in turn for all
    layers; its tokens count as computed, and it may have logits rows, in the last of them. One such piece is under way at a
    time. None: every row computes all layers."""
    state_before: tuple[StateOp, ...] = ()
    """Changes of state blocks before the rows run: new sequences' blocks are zeroed or copied from snapshots. A source may
    belong to a later operation's target, or to KV of the rows."""
    state_after: tuple[StateOp, ...] = ()
    """Changes behind the rows: snapshots of their states."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all layers: of a row that computes some of them, its share."""
        num_tokens = sum(row.num_tokens for row in self.rows)
        if self.layers is None:
            return num_tokens
        return num_tokens - self.rows[-1].num_tokens + self.layers.share(self.rows[-1].num_tokens)

    def num_completed(self, row: Row) -> int:
        """Returns the tokens of one of ``rows`` whose KV is in the cache, in all layers, once the step is done."""
        unfinished = self.layers is not None and not self.layers.last and row is self.rows[-1]
        return 0 if unfinished else row.num_tokens


class SamplePlan(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Inputs of a step's sampling that were unknown when its model was launched. May be empty."""

    step: int
    seq_ids: list[int] = []
    """The sequence of each mask. A sequence has as many as it has logits rows, in their order, or none."""
    masks: memoryview = memoryview(b"")
    """Token bitmasks in a row: little-endian int32 words ``[ceil(vocab_size / 32)]`` each; a set bit allows the token."""

    def __bool__(self) -> bool:
        return bool(self.seq_ids)


class SparseOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Decision and attended blocks of a row that attends sparsely."""

    decision: bytes
    """Classes ``[layers, kv_heads]`` that the router gave to the heads in this step; empty: it gave none."""
    kept: list[int]
    """Per layer, pairs of a query block and a key block that were attended, over all query heads; 0 in a layer that cannot
    attend sparsely."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Output of one step, by sequence."""

    step: int
    seq_ids: list[int]
    """The sequences of the rows that sampled, in row order."""
    token_ids: list[list[int]]
    """Per entry of ``seq_ids``, 0 to ``num_logits`` tokens."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """seq_id -> an entry for each sampled token, for sequences that request logprobs."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """seq_id -> entries for the prompt tokens ``num_computed + 1 ...`` of the chunk, for sequences that request them."""
    errors: dict[int, Failure] = {}
    """seq_id -> why this sequence failed; others are not affected."""
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    replayed: bool | None = None
    """Whether the model ran as a CUDA graph (True) or eagerly (False); None: it did not run."""
    padding_tokens: int = 0
    """Padding tokens computed to fill a CUDA graph."""
    sparse: dict[int, SparseOutcome] = {}
    """seq_id -> of rows that attend sparsely."""
    routed_experts: dict[int, bytes] = {}
    """seq_id -> ``RoutedExperts.data`` of the row's tokens, for sequences that request it."""
    pooled: dict[int, bytes] = {}
    """seq_id -> little-endian float32 numbers, for prompts that are pooled and whose last chunk was in the step."""


class GraphCount(NamedTuple):
    """Number of CUDA graphs that are captured and current, and how many there will be; equal: nothing is left to capture."""

    captured: int
    total: int
    failure: str = ""
    """Reason why a capture failed, after which no other is tried; empty: none did."""


class RunnerEvent(msgspec.Struct, frozen=True, array_like=True, tag="event"):
    """An event between two steps of a runner that bears on later steps: part of a recorded stream."""

    what: Literal["capture", "weights"]
    """A CUDA graph was captured, which later steps replay; or weights were updated."""


Recorded = StepPlan | SamplePlan | RunnerEvent


def pack_tokens(token_ids: Sequence[int]) -> Tokens:
    return array("i", token_ids)


def _to_bytes(tokens: Any) -> bytes:
    if not isinstance(tokens, array):
        raise NotImplementedError(f"a plan holds no {type(tokens).__name__}")
    return tokens.tobytes()


def _from_bytes(kind: type, data: Any) -> Tokens:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decoder: msgspec.msgpack.Decoder[Recorded] = msgspec.msgpack.Decoder(Recorded, dec_hook=_from_bytes)


def encode_plan(plan: Recorded) -> bytes:
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> Recorded:
    return _decoder.decode(data)
