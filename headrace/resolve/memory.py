"""Size of the KV cache and maximum length of a sequence."""

from __future__ import annotations

import dataclasses
import math
import typing

from headrace.config import CacheConfig, EngineArgs
from headrace.errors import ConfigError, MemoryConfigError, human_size
from headrace.model_spec import AnySpec, Arena, CacheGroup, ModelSpec, StateGroup, block_sizes, cache_groups
from headrace.models.size import adapter_lines, weight_bytes
from headrace.parallel.layout import largest
from headrace.resolve.facts import DecisionLog, DeviceFacts

CUDA_SLACK = 2 << 30
"""Bytes of a GPU reserved for what profiling does not measure: CUDA graphs, workspaces of libraries, fragments."""
_ENTRY_BYTES = 4
"""Bytes of a token id or a block number."""
KV_SHARE = 0.25
"""Default share of the memory beside the weights that the KV cache takes at most."""
KV_MODEST = 2 * 2**30
"""Default size of the KV cache in bytes: zeroing it takes about a second."""
KV_SHARE_MOST = 0.8
"""Share that it may take where less would not hold one sequence."""


def estimated_room(args: EngineArgs, model: AnySpec, dtype: str, quantization: str, device: DeviceFacts) -> int:
    """Bytes left for KV beside the weights, before these are there."""
    # Ranks must come to the same size of the cache, so each counts the weights of the one that holds the most.
    whole = largest(model) if isinstance(model, ModelSpec) else model
    asked = quantization, device.device, args.quantize_head, args.quantization_ignore
    weights = weight_bytes(whole, dtype, *asked, copies=device.keeps_copies)
    if weights > device.available_memory:
        raise MemoryConfigError(
            f"the model's configuration means {human_size(weights)} of weights, and {human_size(device.available_memory)} are "
            "free",
            "model",
        )
    room = device.available_memory - weights - sum(line.nbytes for line in adapter_lines(whole, dtype, args))
    if device.cuda:
        room -= CUDA_SLACK + int((1 - args.gpu_memory_utilization) * device.total_memory)
    return room


class KVPlan:
    """Size of the KV cache and maximum length of a sequence."""

    def __init__(
        self,
        args: EngineArgs,
        model: AnySpec,
        kv_dtype: str,
        num_seqs: int,
        num_batched: int,
        free: int,
        whole: bool,
        states: StateGroup | None = None,
    ) -> None:
        """``whole``: all that is free is the cache's to take, as on a GPU that serves nothing else."""
        self._args = args
        self._model = model
        self._dtype = kv_dtype
        self._num_seqs = num_seqs
        self._num_batched = num_batched
        self._whole = whole
        self._free = max(0, free)
        """Bytes left beside the weights."""
        self._groups = cache_groups(model.layers, kv_dtype)
        self._states = states
        state_bytes = 0 if states is None else states.block_bytes
        self._sizes = block_sizes(self._groups, args.block_size, state_bytes)

    def choose(self, log: DecisionLog) -> tuple[CacheConfig, int]:
        length = self._asked_length()
        if self._args.num_kv_blocks is not None:
            length, nbytes = self._from_blocks(length, self._args.num_kv_blocks, log)
        else:
            length, nbytes = self._from_memory(length, log)
        args = self._args
        cache = CacheConfig(
            block_size=args.block_size,
            groups=self._groups,
            nbytes=nbytes,
            enable_prefix_caching=args.enable_prefix_caching,
            dtype=self._dtype,
            states=self._states,
            state_grid=0 if self._states is None else state_grid(args.block_size),
        )
        if self._states is not None:
            cache = with_snapshots(cache, args.state_snapshot_bytes, log)
        return cache, length

    def _asked_length(self) -> int | None:
        """None: as long as fits, as where the cache was given a size and the length was left open."""
        length, most = self._args.max_model_len, self._model.max_position
        sized = self._args.num_kv_blocks is not None or self._args.kv_cache_memory is not None
        if length == "auto" or (length is None and sized):
            return None
        if length is None:
            return most
        if length > most:
            why = ""
            if any(layer.rope is not None and layer.rope.kind == "longrope" for layer in self._model.layers):
                why = ": beyond it, longrope turns tokens by other factors, and those in the cache would have to follow"
            raise ConfigError(
                f"max_model_len {length} is longer than the model's context of {most} tokens{why}", "max_model_len"
            )
        return length

    def _from_blocks(self, length: int | None, count: int, log: DecisionLog) -> tuple[int, int]:
        """Room for ``count`` blocks of each group, and the null block. In bytes; groups may divide it otherwise."""
        nbytes = Arena.holding(self._sizes, self._counts([count] * len(self._groups), self._num_seqs)).nbytes
        longest = self._longest(lambda candidate: self._least_bytes(candidate) <= nbytes)
        if length is None:
            length = self._auto_length(longest, f"{count} KV blocks", log)
        elif length > longest:
            raise ConfigError(
                f"{count} KV blocks of {self._args.block_size} tokens do not hold one sequence of {length} tokens: set "
                f"num_kv_blocks to {self._least_blocks(length)} or more, or max_model_len to {longest} or less, or to auto",
                "num_kv_blocks",
            )
        return length, self._there_is(nbytes, "num_kv_blocks")

    def _there_is(self, nbytes: int, name: str) -> int:
        """The bytes that were asked for.

        Raises:
            ConfigError: fewer are free.
        """
        if nbytes > self._free:
            value = getattr(self._args, name)
            raise MemoryConfigError(
                f"{name} {value:,} takes {human_size(nbytes)}, and {human_size(self._free)} are there beside the weights", name
            )
        return nbytes

    def _from_memory(self, length: int | None, log: DecisionLog) -> tuple[int, int]:
        requested = self._args.kv_cache_memory
        share, most = min(int(self._free * KV_SHARE), KV_MODEST), int(self._free * KV_SHARE_MOST)
        if self._whole:
            share = most = self._free
        if length is None:
            budget = share if requested is None else requested
            longest = self._longest(lambda candidate: self._least_bytes(candidate) <= budget)
            length = self._auto_length(longest, f"{human_size(budget)} of KV cache", log)
        least = self._least_bytes(length)
        if least > (most if requested is None else requested):
            raise self._does_not_fit(length, least, most if requested is None else requested)
        if requested is not None:
            return length, self._there_is(Arena(requested, self._sizes).fitted(requested).nbytes, "kv_cache_memory")
        counts = self._counts([self._useful(group, length) for group in self._groups], self._num_seqs)
        useful = Arena.holding(self._sizes, counts).nbytes
        budget = share if self._whole else min(useful, max(share, least))
        if budget == useful:
            why = f"{self._num_seqs} sequences of {length} tokens could use no more"
        elif budget == least:
            why = f"one sequence of {length} tokens needs as much"
        elif self._whole:
            why = "all that is left of gpu_memory_utilization: more requests run at once, more prefixes are kept"
        elif share == KV_MODEST:
            why = "what is taken without being asked for; more lets more requests run at once and keeps more prefixes"
        else:
            why = f"{KV_SHARE:.0%} of the memory that is free beside the weights"
        nbytes = Arena(budget, self._sizes).fitted(budget).nbytes
        log.note("kv_cache_memory", f"{nbytes:,}", why)
        return length, nbytes

    def _does_not_fit(self, length: int, least: int, there: int) -> ConfigError:
        longest = self._longest(lambda candidate: self._least_bytes(candidate) <= there)
        shorter = f"max_model_len to {longest} or less, or to auto" if longest >= 2 else ""
        if self._args.kv_cache_memory is not None:
            message = (
                f"one sequence of {length} tokens needs {human_size(least)} of KV cache, and kv_cache_memory is "
                f"{human_size(there)}: set "
            )
            shorter = f", or {shorter}" if shorter else ""
            return ConfigError(f"{message}kv_cache_memory to {least} or more{shorter}", "kv_cache_memory")
        where = f" within gpu_memory_utilization {self._args.gpu_memory_utilization}" if self._whole else ""
        message = (
            f"one sequence of {length} tokens needs {human_size(least)} of KV cache, and at most {human_size(there)} are free"
            f"{where}"
        )
        return MemoryConfigError(f"{message}: set {shorter}" if shorter else message, "max_model_len")

    def _auto_length(self, longest: int, where: str, log: DecisionLog) -> int:
        if longest < 2:
            sized = "kv_cache_memory" if self._args.num_kv_blocks is None else "num_kv_blocks"
            param = sized if self._args.max_model_len is None else "max_model_len"
            least = self._least_bytes(2)
            more = f"set kv_cache_memory to {least} or more"
            if self._args.num_kv_blocks is not None:
                more = f"set num_kv_blocks to {self._least_blocks(2)} or more"
            elif self._args.kv_cache_memory is None:
                more = f"they need {human_size(least)}"
            raise MemoryConfigError(f"not even 2 tokens fit in {where}: {more}", param)
        if longest < self._model.max_position:
            log.note("max_model_len", longest, f"the longest that fits in {where}")
        elif self._args.max_model_len == "auto":
            log.note("max_model_len", longest, "the model's context, all of it")
        return longest

    def _longest(self, fits: typing.Callable[[int], bool]) -> int:
        """The largest length up to the model's context for which ``fits``, which is monotone; 0: none."""
        low, high = 0, self._model.max_position
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _blocks(self, group: CacheGroup, length: int, chunk: int) -> int:
        """Blocks that one sequence holds at most: of a window group, those that a chunk's tokens still see."""
        size = self._args.block_size
        whole = -(-length // size)
        if group.window is None:
            return whole
        return min(whole, (group.window - 1 + chunk + size - 2) // size + 1)

    def _fewest(self, group: CacheGroup, length: int) -> int:
        """Returns the fewest blocks with which one sequence of ``length`` can run at all, its prompt token by token."""
        return self._blocks(group, length, 1)

    def _useful(self, group: CacheGroup, length: int) -> int:
        """Returns the most blocks of a group that sequences can use: more could only serve the prefix cache."""
        return self._num_seqs * self._blocks(group, length, min(self._num_batched, length))

    def _least_blocks(self, length: int) -> int:
        """Returns the ``num_kv_blocks`` that hold one sequence of ``length``."""
        sizes = self._sizes[: len(self._groups)]
        least = sum(self._fewest(group, length) * size for group, size in zip(self._groups, sizes, strict=True))
        return -(-least // sum(sizes))

    def _least_bytes(self, length: int) -> int:
        return Arena.holding(self._sizes, self._counts([self._fewest(group, length) for group in self._groups], 1)).nbytes

    def _counts(self, blocks: list[int], num_seqs: int) -> list[int]:
        """Blocks of each group of the arena: ``blocks`` of KV, and the states of ``num_seqs`` sequences."""
        return blocks if self._states is None else [*blocks, num_seqs]


STATE_TILE = 64
"""Tokens of a tile, in which kernels compute prompts."""


def state_grid(block_size: int) -> int:
    """Returns the tokens at whose multiples both tiles and blocks end."""
    return math.lcm(STATE_TILE, block_size)


SNAPSHOT_SHARE = 0.3
"""Default share of the cache that snapshots of states may take."""


def with_snapshots(cache: CacheConfig, nbytes: int | None, log: DecisionLog) -> CacheConfig:
    """Returns the cache with the bytes that snapshots of states may take; None: a share of it."""
    if not cache.enable_prefix_caching:
        return cache
    if nbytes is None:
        nbytes = int(SNAPSHOT_SHARE * cache.arena.capacity)
        why = f"{SNAPSHOT_SHARE:.0%} of the cache: more finds more prefixes, and leaves less KV to be kept"
        log.note("state_snapshot_bytes", f"{nbytes:,}", why)
    return dataclasses.replace(cache, state_snapshot_bytes=nbytes)


def check_slots(args: EngineArgs, num_seqs: int, max_model_len: int, num_groups: int, room: int) -> None:
    """Raises ConfigError if the tokens and block tables of all running sequences do not fit beside the weights."""
    row = max_model_len + 1 + num_groups * -(-max_model_len // args.block_size)
    nbytes = num_seqs * row * _ENTRY_BYTES
    if nbytes > room:
        raise MemoryConfigError(
            f"max_num_seqs {num_seqs:,} takes {human_size(nbytes)} for tables of sequences of up to {max_model_len:,} tokens, "
            f"and {human_size(room)} are free beside the weights: lower max_num_seqs or max_model_len",
            "max_num_seqs",
        )
