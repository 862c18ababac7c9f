"""SequenceBlocks: the blocks of one sequence."""

from __future__ import annotations

import dataclasses

from headrace.kv.block_pool import NULL_BLOCK
from headrace.kv.identity import CacheIdentity
from headrace.kv.prefix_cache import KeyChain
from headrace.kv.rows import TokenRows


@dataclasses.dataclass(slots=True)
class SequenceStates:
    """The state blocks of one sequence; the null block where it has none."""

    live: int = NULL_BLOCK
    source: int = NULL_BLOCK
    """The live block starts as a copy of this one, which is held until the plan with the copy is made."""
    fork: int = NULL_BLOCK
    """The state after ``fork_count`` tokens, from which other samples start; it is held until they have joined the queue."""
    fork_count: int = 0
    shadow: int = NULL_BLOCK
    shadow_count: int = 0
    turns: tuple[int, ...] = ()
    """Numbers of tokens at which turns of the conversation have snapshots."""
    points: dict[int, str] = dataclasses.field(default_factory=dict)
    """Number of tokens -> why a snapshot is taken there: turn, samples, prompt, branch; or period, for no other reason than its
    distance: it is evicted before those of the same conversation's turns."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SequenceBlocks:
    """The block tables of one sequence. Created by ``KVCacheManager.open`` and changed only by the manager.

    The tables of all groups have the same length: entry ``i`` is for tokens ``[i * block_size, (i + 1) * block_size)``, or
    the null block where the group's window has passed. The runner's copies keep the old number there: no row reads it.
    """

    seq_id: int
    token_ids: list[int]
    """The sequence's list of known tokens, shared with the scheduler, which appends to it."""
    identity: CacheIdentity
    """Identity of the sequence's KV; its weight version is that of ``generation``."""
    groups: dataclasses.InitVar[int]
    tables: tuple[list[int], ...] = dataclasses.field(init=False)
    capacity: int = 0
    """Tokens that the tables have room for."""
    unsent: int = 0
    """Index of the first entry that has not been in a plan yet."""
    keys: KeyChain | None = None
    generation: int = -1
    """The cache's generation in which these blocks were computed; only blocks of the current one can be shared."""
    num_published: int = 0
    """Leading blocks that are findable in the prefix cache, or whose equals are."""
    num_passed: list[int] = dataclasses.field(init=False)
    """Per group, leading entries that the window has passed."""
    keep_from: int | None = None
    """A position at which another sequence will fork: windows do not pass it until then."""
    due: int = 0
    """Number of collected tokens from which on ``KVCacheManager.advance`` has something to do."""
    rows: TokenRows | None = None
    """Set for a request that gets them back, which finds only cached blocks that have rows."""
    states: SequenceStates = dataclasses.field(default_factory=SequenceStates)
    """State blocks, of models with state layers."""

    def __post_init__(self, groups: int) -> None:
        self.tables = tuple([] for _ in range(groups))
        self.num_passed = [0] * groups
