"""A runner without a model that checks every plan it is given.

It keeps its state from the stream of plans alone, as a real runner does. In place of KV it stores, in each byte of the
arena, a fingerprint of the token history that wrote it; each row must then find the fingerprints of its own history at
every position it can see. Wrong prefix hits, blocks reused too early, blocks of two groups that overlap, moves that lose
something and forks with missing data all end in PlanError.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import zlib
from collections import deque
from typing import NamedTuple

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import GraphCount, NewSequence, Row, SamplePlan, StepPlan, StepResult
from headrace.core.request import Request
from headrace.kv import StateOp
from headrace.outputs import Failure, TokenLogprobs

VOCAB = 11
BROKEN = "the state of a sequence that has failed"
EOS = 0


class PlanError(AssertionError):
    """The plan breaks the contract between scheduler and runner."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


class Absorbed(NamedTuple):
    """Content of a state block: the number of tokens, and the hash of them."""

    count: int
    tokens: int


class History:
    """Fingerprints of a growing list of tokens. A token of a bidirectional item sees the whole item."""

    def __init__(self, request: Request, tokens: list[int], weights: int) -> None:
        self.tokens = tokens
        both_ways = [item for item in request.items if item.bidirectional]
        self._seen_to = {position: item.end for item in both_ways for position in range(item.start, item.end)}
        self._contents = {item.start: (item.end, item.bidirectional, item.content_hash) for item in request.items}
        salt = -1 if request.cache_salt is None else zlib.crc32(request.cache_salt.encode())
        self._chain = [hash((salt, weights))]

    def up_to(self, position: int) -> int:
        """Returns the hash of the tokens ``[0, position]``, with the items that begin there."""
        for p in range(len(self._chain) - 1, position + 1):
            self._chain.append(hash((self._chain[-1], self.tokens[p], self._contents.get(p))))
        return self._chain[position + 1]

    def keep(self, length: int) -> None:
        """Forgets the tokens behind the first ``length``."""
        del self.tokens[length:], self._chain[length + 1 :]

    def kv(self, position: int) -> tuple[int, int]:
        """Returns everything on which the KV of one position depends."""
        return position, self.up_to(max(position, self._seen_to.get(position, 0) - 1))


def sample(history: int, seed: int, index: int) -> int:
    """The next token: a function of what the last token has seen, of the seed and of the sample's index."""
    return (hash((history, seed, index)) >> 7) % VOCAB


def prompt_logprob(history: int, token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-1.0 - history % 97], 1 + history % 5)


@dataclasses.dataclass
class Slot:
    """State that a real runner keeps in a slot."""

    new: NewSequence
    history: History
    tables: list[list[int]]
    num_computed: int | None = None
    longest: int = 0
    """The greatest end of a row."""
    encoded: set[int] = dataclasses.field(default_factory=set)
    """Starts of the items whose encoders have run."""
    state: int = 0
    """The state block."""

    @property
    def tokens(self) -> list[int]:
        return self.history.tokens


class OracleRunner:
    """``requests`` maps seq_id to its request: the oracle needs items and salts, which plans do not carry.

    ``errors`` maps seq_id to a length: the row that brings the sequence there fails.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, requests: dict[int, Request], errors: dict[int, int] | None = None
    ) -> None:
        self.config = config
        self.cache = cache
        self.requests = requests
        self.errors = {} if errors is None else errors
        self.weights = 0
        self.slots: dict[int, Slot] = {}
        self.memory: list[object] = [None] * cache.nbytes
        self.in_flight: deque[tuple[StepPlan, StepResult, dict[int, int]]] = deque()
        """Launched steps: plan, result, and byte -> the sequence that writes the block it is in."""
        self.last_step = 0
        self.num_hit_tokens = 0
        self.num_accepted_drafts = 0
        self.num_moves = 0
        self.num_copies = 0
        """Copies of state blocks."""

    def execute(self, plan: StepPlan) -> int:
        check(plan.step == self.last_step + 1, f"step {plan.step} after step {self.last_step}")
        self.last_step = plan.step
        check(len(self.in_flight) < self.config.pipeline_depth, "more steps in flight than the pipeline is deep")
        check(plan.num_tokens <= self.config.max_num_batched_tokens, "more tokens than the budget")
        for move in plan.moves:
            self._move(*move)
        for slot in plan.released:
            check(slot in self.slots, f"slot {slot} was released but is vacant")
            del self.slots[slot]
        for new in plan.new:
            self._take_slot(new)
        self._apply(plan.state_before)
        check(len({row.seq_id for row in plan.rows}) == len(plan.rows), "a sequence has two rows")
        check(len(self.slots) <= self.config.max_num_seqs, "more sequences than max_num_seqs")
        for place, row in enumerate(plan.rows):
            self._check_row(row, decode=place < plan.num_decode_rows)
        check(sum(map(self._encode, plan.rows)) <= self.config.max_num_encoder_tokens, "more encoder work than the budget")
        check({new.seq_id for new in plan.new} <= {row.seq_id for row in plan.rows}, "a new sequence has no row")
        writes = self._write(plan)
        self._read(plan)
        if self.cache.states is not None:
            self._absorb(plan)
        self._apply(plan.state_after)
        self.in_flight.append((plan, self._result(plan), writes))
        return plan.step

    def sample(self, handle: int, plan: SamplePlan) -> None:
        check(plan.step == handle == self.last_step, "a step is sampled before the next is executed")

    def collect(self, handle: int) -> StepResult:
        plan, result, _ = self.in_flight.popleft()
        check(plan.step == handle, "steps are collected in the order of their launch")
        return result

    def capture_next(self) -> GraphCount:
        return self.graphs()

    def graphs(self) -> GraphCount:
        return GraphCount(0, 0)

    def close(self) -> None:
        pass

    def _bytes(self, group: int, block: int) -> range:
        size = self.cache.arena.block_bytes[group]
        check(0 < block < self.cache.num_blocks[group], f"block {block} of group {group} does not exist")
        return range(block * size, (block + 1) * size)

    def _move(self, group: int, source: int, target: int) -> None:
        """Comes after all that was launched before: what a step in flight writes is at the new place already."""
        self.num_moves += 1
        old, new = self._bytes(group, source), self._bytes(group, target)
        self.memory[new.start : new.stop] = self.memory[old.start : old.stop]
        for _, _, writes in self.in_flight:
            moved = [writes.pop(byte, None) for byte in old]
            for byte, writer in zip(new, moved, strict=True):
                writes.pop(byte, None)
                if writer is not None:
                    writes[byte] = writer
        for slot in self.slots.values():
            if group == len(self.cache.groups):
                slot.state = target if slot.state == source else slot.state
                continue
            table = slot.tables[group]
            table[:] = [target if block == source else block for block in table]

    def _take_slot(self, new: NewSequence) -> None:
        check(0 <= new.slot < self.config.max_num_seqs, f"slot {new.slot} does not exist")
        check(new.slot not in self.slots, f"slot {new.slot} is taken")
        check(all(slot.new.seq_id != new.seq_id for slot in self.slots.values()), f"sequence {new.seq_id} has two slots")
        request = self.requests[new.seq_id]
        check(list(new.token_ids[: new.prompt_len]) == request.prompt_token_ids, "the prompt has changed")
        check(len(new.token_ids) < self.config.max_model_len, "a sequence that is full was scheduled")
        tokens = list(new.token_ids)
        history, tables = History(request, tokens, self.weights), [[] for _ in self.cache.groups]
        self.slots[new.slot] = Slot(new, history, tables, state=new.state)

    def _check_row(self, row: Row, *, decode: bool) -> None:
        slot = self.slots[row.slot]
        start, end = row.num_computed, row.num_computed + row.num_tokens
        check(slot.new.seq_id == row.seq_id, f"row of sequence {row.seq_id} in the slot of {slot.new.seq_id}")
        if slot.num_computed is None:
            self.num_hit_tokens += start
        else:
            check(start == slot.num_computed, f"row starts at {start}, the slot is at {slot.num_computed}")
        slot.num_computed, slot.longest = end, max(slot.longest, end)
        slot.tokens.extend(row.drafts)
        check(row.num_tokens >= 1 and end <= len(slot.tokens), f"row [{start}, {end}) of {len(slot.tokens)} tokens")
        check(end < self.config.max_model_len, "computes the last position, whose token needs no KV")
        samples = end == len(slot.tokens)
        check(row.num_logits == (1 + len(row.drafts) if samples else 0), "samples exactly at the last known token")
        check(decode == (start >= len(slot.new.token_ids)), "decode rows first, then prefill rows")
        for item in self.requests[row.seq_id].items:
            check(not (item.atomic and item.start < start < item.end), f"chunk begins inside {item}")
            check(not (item.atomic and item.start < end < item.end), f"chunk ends inside {item}")
        for table, new_blocks in zip(slot.tables, row.new_blocks, strict=True):
            table.extend(new_blocks)
            check(len(table) == -(-slot.longest // self.cache.block_size), f"{len(table)} blocks for {slot.longest} tokens")

    def _encode(self, row: Row) -> int:
        """Encodes the items that the row needs for the first time; returns what that costs."""
        slot, end = self.slots[row.slot], row.num_computed + row.num_tokens
        items = [item for item in self.requests[row.seq_id].items if item.start < end and item.end > row.num_computed]
        cost = sum(item.encoder_tokens for item in items if item.start not in slot.encoded)
        slot.encoded |= {item.start for item in items}
        return cost

    def _apply(self, ops: tuple[StateOp, ...]) -> None:
        group = len(self.cache.groups)
        for op in ops:
            self.num_copies += op.kind == "copy"
            target = self._bytes(group, op.target)
            content: list[object] = [Absorbed(0, 0)] * len(target)
            if op.kind == "copy":
                source = self._bytes(group, op.source)
                content = self.memory[source.start : source.stop]
            self.memory[target.start : target.stop] = content

    def _absorb(self, plan: StepPlan) -> None:
        """Each row finds the state of exactly its earlier tokens, and leaves that of all of them. One that fails breaks it."""
        for row in plan.rows:
            slot, start, end = self.slots[row.slot], row.num_computed, row.num_computed + row.num_tokens
            place = self._bytes(len(self.cache.groups), slot.state)
            found = self.memory[place.start : place.stop]
            fine = found == [Absorbed(start, slot.history.up_to(start - 1) if start else 0)] * len(place)
            broken = found == [BROKEN] * len(place) and start >= self.errors.get(row.seq_id, start + 1)
            check(fine or broken, f"step {plan.step}: sequence {row.seq_id} has another state at {start}: {set(found)}")
            failed = broken or end >= self.errors.get(row.seq_id, end + 1)
            left = BROKEN if failed else Absorbed(end, slot.history.up_to(end - 1))
            self.memory[place.start : place.stop] = [left] * len(place)

    def _visible(self, group: int, start: int) -> int:
        window = self.cache.groups[group].window
        return 0 if window is None else max(0, start - window + 1)

    def _write(self, plan: StepPlan) -> dict[int, int]:
        size, writes = self.cache.block_size, {}
        for row in plan.rows:
            slot = self.slots[row.slot]
            for group, table in enumerate(slot.tables):
                start, end = row.num_computed, row.num_computed + row.num_tokens
                for block in table[start // size : -(-end // size)]:
                    for byte in self._bytes(group, block):
                        check(writes.setdefault(byte, row.seq_id) == row.seq_id, f"two rows write byte {byte}")
                for p in range(start, end):
                    for place, byte in enumerate(self._cell(group, table[p // size], p)):
                        self.memory[byte] = group, place, slot.history.kv(p)
        for _, _, earlier in self.in_flight:
            for byte, seq_id in writes.items():
                check(earlier.get(byte, seq_id) == seq_id, f"{byte} is rewritten while a step in flight writes it")
        self._check_sole_holders(writes)
        return writes

    def _cell(self, group: int, block: int, position: int) -> range:
        """The bytes of one token."""
        width = self.cache.groups[group].bytes_per_token
        start = self._bytes(group, block).start + position % self.cache.block_size * width
        return range(start, start + width)

    def _check_sole_holders(self, writes: dict[int, int]) -> None:
        """A block that is written is in no other live sequence's visible table."""
        for slot in self.slots.values():
            for group, table in enumerate(slot.tables):
                first = self._visible(group, slot.num_computed or 0) // self.cache.block_size
                for block in table[first:]:
                    writers = {writes[byte] for byte in self._bytes(group, block) if byte in writes}
                    check(writers <= {slot.new.seq_id}, f"sequences {writers} write block {block} of {slot.new.seq_id}")

    def _read(self, plan: StepPlan) -> None:
        size = self.cache.block_size
        for row in plan.rows:
            slot = self.slots[row.slot]
            for group, table in enumerate(slot.tables):
                for p in range(self._visible(group, row.num_computed), row.num_computed + row.num_tokens):
                    cell = self._cell(group, table[p // size], p)
                    check(
                        [self.memory[byte] for byte in cell] == [(group, i, slot.history.kv(p)) for i in range(len(cell))],
                        f"step {plan.step}: sequence {row.seq_id} sees another history at position {p} of group {group}",
                    )

    def _result(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step, [], [], {}, {}, {})
        for row in plan.rows:
            slot = self.slots[row.slot]
            end = row.num_computed + row.num_tokens
            if end >= self.errors.get(row.seq_id, end + 1):
                result.errors[row.seq_id] = Failure("injected")
            if slot.new.sampling.prompt_logprobs is not None:
                wanted = range(row.num_computed, min(end, slot.new.prompt_len - 1))
                result.prompt_logprobs[row.seq_id] = [prompt_logprob(slot.history.up_to(p), slot.tokens[p + 1]) for p in wanted]
            if row.num_logits:
                known = end - len(row.drafts)
                tokens = [sample(slot.history.up_to(p), slot.new.seed, slot.new.sample_index) for p in range(known - 1, end)]
                pairs = zip(tokens, row.drafts, strict=False)
                accepted = sum(itertools.accumulate((token == draft for token, draft in pairs), operator.mul))
                self.num_accepted_drafts += accepted
                tokens = tokens[: accepted + 1]
                result.seq_ids.append(row.seq_id)
                result.token_ids.append(tokens)
                if slot.new.sampling.logprobs is not None:
                    entries = [TokenLogprobs([token], [-float(known + place)], 1) for place, token in enumerate(tokens)]
                    result.logprobs[row.seq_id] = entries
                slot.history.keep(known)
                slot.tokens.extend(tokens)
                slot.num_computed = end - (row.num_logits - len(tokens))
        return result


def expected_outputs(request: Request, index: int, max_model_len: int, weights: int = 0) -> tuple[list[int], str]:
    """Returns the tokens that a sample must generate, and why it ends, computed one after the other and alone."""
    history = History(request, list(request.prompt_token_ids), weights)
    outputs: list[int] = []
    params = request.sampling
    while True:
        token = sample(history.up_to(len(history.tokens) - 1), request.seed, index)
        history.tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return outputs, "stop"
            if token in (params.stop_token_ids or []):
                return outputs, "stop"
        if len(outputs) == request.max_tokens or len(history.tokens) == max_model_len:
            return outputs, "length"


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    history = History(request, list(request.prompt_token_ids), 0)
    tokens = request.prompt_token_ids
    return [prompt_logprob(history.up_to(p), tokens[p + 1]) for p in range(len(tokens) - 1)]
