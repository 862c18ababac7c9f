"""Groups of unequal sizes in one arena, under a scheduler and a mixed trace: what is free when somebody is refused, and hits.

For comparison, the same trace with memory divided among the groups once and for all, in proportion to what a sequence of
the longest length needs of each.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
from support.cache_config import cache_holding

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.kv import NULL_BLOCK, Hit, KVCacheManager, SequenceBlocks
from headrace.kv.block_pool import BlockPool
from headrace.model_spec import AttentionSpec, cache_groups
from headrace.sampling_params import SamplingParams

BLOCK = 16
LONGEST = 2048


def layers(*kinds: tuple[int, int | None, int, int, int]) -> list[AttentionSpec]:
    """(count, window, KV heads, width of K, width of V) each."""
    numbers = itertools.count()
    return [
        AttentionSpec(
            layer=next(numbers), num_heads=heads, num_kv_heads=heads, head_dim=d, v_head_dim=dv, scale=1.0, window=window
        )
        for count, window, heads, d, dv in kinds
        for _ in range(count)
    ]


MODELS = {
    "9 full, 39 of window 128 with twice the heads, K 192, V 128": layers((9, None, 4, 192, 128), (39, 128, 8, 192, 128)),
    "5 full, 29 of window 512": layers((5, None, 4, 256, 256), (29, 512, 4, 256, 256)),
    "as many of either, of one size": layers((12, None, 8, 64, 64), (12, 128, 8, 64, 64)),
    "three groups of odd sizes": layers((3, None, 6, 80, 48), (2, 700, 1, 192, 128), (4, 100, 3, 64, 40)),
}
FIRST, *_, LAST = MODELS
models = pytest.mark.parametrize(
    "model", [name if name == LAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)

TOKENS = dict.fromkeys(MODELS, 120_000) | {FIRST: 30_000}
"""Memory that the mixed trace fills."""


def cache(model: str, num_tokens: int, caching: bool = False) -> CacheConfig:
    """Makes a cache of the memory that ``num_tokens`` tokens of full attention in every layer would take."""
    groups = cache_groups(MODELS[model], "bfloat16")
    counts = [num_tokens // BLOCK] * len(groups)
    return cache_holding(counts, block_size=BLOCK, groups=groups, enable_prefix_caching=caching, dtype="bfloat16")


@dataclasses.dataclass
class Refusal:
    """An admission that failed for want of blocks."""

    needed: int
    free: int
    """Bytes in no sequence's tables and awaited by no step, counted block by block; the null block is among them."""


class Counted(KVCacheManager):
    """Keeps account of the admissions that it refuses."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.config = config
        self.refusals: list[Refusal] = []

    def fits(self, blocks: SequenceBlocks, hit: Hit | None, num_tokens: int, first_tokens: int) -> bool:
        fitting = super().fits(blocks, hit, num_tokens, first_tokens)
        if not fitting:
            whole = -(-num_tokens // BLOCK)
            needed = [whole if group.window is None else min(whole, -(-group.window // BLOCK) + 1) for group in self.groups]
            sizes = self.config.arena.block_bytes
            owned = sum(size * self.owned(group) for group, size in enumerate(sizes))
            self.refusals.append(
                Refusal(sum(map(int.__mul__, needed, sizes)), self.config.nbytes - owned - self._regions.pending_bytes)
            )
        return fitting

    def owned(self, group: int) -> int:
        tables = (blocks.tables[group] for blocks in self._sequences.values())
        return len({block for table in tables for block in table} - {NULL_BLOCK})


class Separate(Counted):
    """Each group has a fixed share of the same bytes."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        sizes = config.arena.block_bytes
        wanted = [
            min(LONGEST, LONGEST if group.window is None else group.window - 1 + 512) / BLOCK * size
            for group, size in zip(config.groups, sizes, strict=True)
        ]
        each = config.arena.capacity / sum(wanted)
        counts = [int(each * want / size) for want, size in zip(wanted, sizes, strict=True)]
        self.pools = self._regions.pools = tuple(BlockPool(range(1, count + 1)) for count in counts)
        self._indexes = tuple(pool.index for pool in self.pools)
        self._regions.reserve = lambda counts: all(n <= p.num_free for n, p in zip(counts, self.pools, strict=True))

    def fits(self, blocks: SequenceBlocks, hit: Hit | None, num_tokens: int, first_tokens: int) -> bool:
        start = blocks.capacity if hit is None else hit.num_tokens
        for group, pool in enumerate(self.pools):
            end = num_tokens if self.groups[group].window is None else min(num_tokens, start + first_tokens)
            taken = sum(block != NULL_BLOCK and pool.is_free(block) for block in hit.blocks[group]) if hit else 0
            if -(-end // BLOCK) - start // BLOCK + taken > pool.num_free:
                owned = sum(size * self.owned(g) for g, size in enumerate(self.config.arena.block_bytes))
                self.refusals.append(Refusal(0, self.config.nbytes - owned - self._regions.pending_bytes))
                return False
        return True

    def room(self, blocks: SequenceBlocks, start: int, *, pending: bool = False) -> int:
        free = min(pool.num_free + (pool.num_pending if pending else 0) for pool in self.pools)
        return blocks.capacity + free * BLOCK - start


def serve(kv: Counted, requests: Iterator[Request], max_num_seqs: int = 400) -> Scheduler:
    """Serves as many requests as possible, from first to last, with a waiting one always at hand."""
    config = SchedulerConfig(
        max_model_len=LONGEST,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_queue_len=10**6,
        policy="fcfs",
        pipeline_depth=1,
    )
    scheduler = Scheduler(config, kv.config)
    scheduler.kv = kv
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, answer(plan))
    if type(kv) is Counted:
        scheduler.check_integrity()
    assert not any(pool.num_used for pool in kv.pools)
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    seq_ids = [row.seq_id for row in plan.rows if row.num_logits]
    return StepResult(plan.step, seq_ids, [[7]] * len(seq_ids))


def request(name: str, prompt: list[int], outputs: int) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, max_tokens=outputs, seed=0)


def mixed_trace(count: int) -> Iterator[Request]:
    """Phases of short chats and of long documents, so that the mix of groups that is needed keeps changing."""
    chance = random.Random(5)
    for number in range(count):
        long = number // 60 % 2
        length = chance.randint(500, 1100) if long else chance.randint(20, 200)
        yield request(f"r{number}", [number] * length, chance.randint(100, 250))


@models
def test_hardly_anything_is_free_when_an_admission_is_refused(model: str) -> None:
    kv = Counted(cache(model, TOKENS[model]))
    serve(kv, mixed_trace(480))
    refusals = [refusal for refusal in kv.refusals if refusal.needed <= 0.01 * kv.config.nbytes]
    assert len(refusals) > 50, "the trace does not fill the cache"
    assert max(refusal.free for refusal in refusals) <= 0.01 * kv.config.nbytes
    # However large a request is: what was free would not have held it.
    unusable = kv.config.nbytes - kv.config.arena.capacity
    assert all(refusal.free - unusable < refusal.needed for refusal in kv.refusals)


@models
def test_divided_memory_is_what_this_saves(model: str) -> None:
    """The trace can tell: with shares that were fixed in advance a good part is free when somebody is refused."""
    divided = Separate(cache(model, TOKENS[model]))
    steps = serve(divided, mixed_trace(480)).stats().step
    free = [refusal.free / divided.config.nbytes for refusal in divided.refusals]
    assert sum(free) / len(free) > 0.04
    assert serve(Counted(divided.config), mixed_trace(480)).stats().step < steps


def conversations(count: int) -> Iterator[Request]:
    """A few system prompts, and turns of many conversations between each other: each continues its own history."""
    chance = random.Random(9)
    histories = [[-7 - who % 3] * 160 for who in range(count)]
    for number in range(count * 6):
        who = chance.randrange(count)
        histories[who] += [1 + who * 1000 + number] * chance.randint(20, 150)
        if len(histories[who]) > LONGEST - 60:
            histories[who] = histories[who][:160]
        outputs = chance.randint(1, 40)
        yield request(f"r{number}", list(histories[who]), outputs)
        histories[who] += [7] * outputs


@models
@pytest.mark.parametrize("num_tokens", [200_000, 16_000])
def test_as_many_hits_as_with_divided_memory(model: str, num_tokens: int) -> None:
    """There are exactly as many with room for all; without, no fewer."""
    config = cache(model, num_tokens, caching=True)
    hits = [serve(kind(config), conversations(40), 8).stats().prefix_hit_tokens for kind in (Counted, Separate)]
    if num_tokens > 100_000:
        assert hits[0] == hits[1] > 50_000
    else:
        assert hits[0] >= hits[1] > 1000
