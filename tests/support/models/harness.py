"""Steps by hand: what a runner would build, for tests that want a model and nothing else of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.attention.context import ForwardContext, StepStates
from headrace.attention.select import create_for
from headrace.cache.planes import allocate
from headrace.cache.states import state_views
from headrace.model_spec import Arena, AttentionSpec, DenseSpec, ModelSpec, StateGroup, cache_groups
from headrace.models.decoder import Decoder
from headrace.models.interface import ModelInputs
from headrace.models.registry import build, name_table
from support.cache_config import cache_holding
from support.state_steps import state_step


def copy_weights(model: Decoder, state: dict[str, torch.Tensor]) -> None:
    """Fills the model from Hugging Face's tensors through the name table; every parameter, once."""
    table = name_table(model.spec).chosen(state)
    parameters = dict(model.named_parameters())
    missing = set(parameters)
    for name, tensor in state.items():
        part = table.part(name)
        if part is None:
            assert table.tied(name) or table.ignored(name), name
            continue
        assert part.stored_shape(parameters[part.parameter]) == tensor.shape, name
        part.fill(parameters[part.parameter].data, tensor)
        missing.discard(part.parameter)
    assert not missing, missing


def random_model(spec: ModelSpec, dtype: str = "float32", seed: int = 0) -> Decoder:
    model = build(spec, dtype, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def model_spec(layers: Sequence[AttentionSpec], **changes: object) -> ModelSpec:
    count = len(layers)
    values: dict = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 61,
        "hidden_size": 24,
        "layers": tuple(layers),
        "mlps": (DenseSpec(40),) * count,
        "norm_eps": 1e-5,
        "max_position": 512,
    }
    return ModelSpec(**{**values, **changes})


NUM_STATES = 8
"""State blocks of a Bench."""


@dataclasses.dataclass
class Seq:
    tokens: list[int]
    computed: int = 0
    tables: list[list[int]] = dataclasses.field(default_factory=list)
    state: int = -1
    """Its state block; -1: it has none."""


def disjoint_blocks(arena: Arena, counts: Sequence[int]) -> list[range]:
    """``counts[g]`` block numbers of each group such that no bytes are in two blocks."""
    numbers, end = [range(0)] * len(counts), arena.reserved
    for group in arena.order:
        size = arena.block_bytes[group]
        start = -(-end // size)
        numbers[group] = range(start, start + counts[group])
        end = numbers[group].stop * size
    assert end <= arena.nbytes
    return numbers


class Bench:
    """A model, a paged cache with shuffled blocks, and sequences that advance as told."""

    def __init__(
        self, model: Decoder, backend: str = "torch", block_size: int = 4, num_blocks: int = 128, seed: int = 0
    ) -> None:
        self.model = model
        dtype = str(model.norm.weight.dtype).removeprefix("torch.")
        groups = cache_groups(model.spec.layers, dtype)
        counts = [num_blocks + 3 * group.index for group in groups]
        config = cache_holding(counts, block_size=block_size, groups=groups, enable_prefix_caching=False, dtype=dtype)
        self.groups, self.block_size = groups, block_size
        self.caches = allocate(config, model.spec, "cpu", dtype)
        layers = model.spec.layers
        self.backends = create_for(layers, [backend] * len(layers), "cpu", dtype)
        shuffle = np.random.default_rng(seed)
        self.free = [list(shuffle.permutation(numbers)) for numbers in disjoint_blocks(config.arena, counts)]
        self.users: list[dict[int, int]] = [{} for _ in groups]
        """Per group, block -> sequences that hold it."""
        group = StateGroup(tuple(state.planes(dtype, "float32") for state in model.spec.states))
        self.state_blocks = torch.full((NUM_STATES, group.block_bytes), 0xFF, dtype=torch.uint8)
        self.states = state_views(self.state_blocks.view(-1), group) if model.spec.states else None
        self.free_states = list(shuffle.permutation(NUM_STATES))

    def sequence(self, tokens: list[int]) -> Seq:
        return Seq(list(tokens), 0, [[] for _ in self.groups])

    def share(self, owner: Seq, tokens: list[int]) -> Seq:
        """A prefix hit: a sequence that holds the blocks of another whose computed tokens, whole blocks of them, are its
        first ones.
        """
        assert owner.computed % self.block_size == 0 and owner.tokens[: owner.computed] == tokens[: owner.computed]
        sequence = Seq(list(tokens), owner.computed, [list(table) for table in owner.tables])
        for group, table in enumerate(sequence.tables):
            for block in table:
                if block:
                    self.users[group][block] += 1
        sequence.state = self._new_state(self.state_blocks[owner.state])
        return sequence

    def _new_state(self, content: torch.Tensor | int) -> int:
        if self.states is None:
            return -1
        block = int(self.free_states.pop())
        self.state_blocks[block] = content
        return block

    def preempt(self, sequence: Seq) -> None:
        """Takes its blocks away. It starts anew with the tokens that it has."""
        for group, table in enumerate(sequence.tables):
            for block in table:
                if block:
                    self._drop(group, block)
        sequence.computed, sequence.tables = 0, [[] for _ in self.groups]
        if sequence.state >= 0:
            self.state_blocks[sequence.state] = 0xFF
            self.free_states.insert(0, sequence.state)
            sequence.state = -1

    def _drop(self, group: int, block: int) -> None:
        """A block that nobody holds is poisoned: whoever still reads it will know. Then it may be used again."""
        self.users[group][block] -= 1
        if self.users[group][block]:
            return
        for cache in self.caches:
            if cache.group == group:
                cache.rows[block] = torch.nan
                if cache.index_keys is not None:
                    cache.index_keys[block] = torch.nan
        self.free[group].insert(0, block)

    def step(
        self,
        rows: list[tuple[Seq, int]],
        *,
        decodes: int = 0,
        wide: int = 0,
        padding: int = 0,
        change: Callable[[ModelInputs], ModelInputs] = lambda inputs: inputs,
    ) -> torch.Tensor:
        """Computes the next ``n`` tokens of each row's sequence.

        Args:
            wide: columns of zeros at the end of the block tables.
            padding: rows at the end that belong to nobody: one token, slot -1, length 0.
            change: of what the model is given.

        Returns:
            ``[T, vocab]`` logits of the rows' tokens.
        """
        ids: list[int] = []
        positions: list[int] = []
        for sequence, count in rows:
            ids += sequence.tokens[sequence.computed : sequence.computed + count]
            positions += range(sequence.computed, sequence.computed + count)
        total = len(ids)
        step = self._metadata(rows, decodes, wide, padding)
        for one in {id(one): one for one in self.backends}.values():
            one.plan(step)
        ctx = ForwardContext(step, self.caches, self.backends, states=self._step_states(rows, padding))
        nowhere = [0] * padding
        inputs = ModelInputs(*(torch.tensor(values + nowhere, dtype=torch.int64) for values in (ids, positions)))
        hidden = self.model(change(inputs), ctx)
        for sequence, count in rows:
            sequence.computed += count
            self._give_back(sequence)
        return self.model.logits(hidden[:total])

    def _step_states(self, rows: list[tuple[Seq, int]], padding: int) -> StepStates | None:
        if self.states is None:
            return None
        for sequence, _ in rows:
            if sequence.state < 0:
                sequence.state = self._new_state(0)
        live = [(sequence.state, count, sequence.computed) for sequence, count in rows]
        return StepStates(state_step([*live, *[(-1, 1, 0)] * padding]), self.states)

    def _metadata(self, rows: list[tuple[Seq, int]], decodes: int, wide: int, padding: int) -> StepMetadata:
        for sequence, count in rows:
            for group, table in enumerate(sequence.tables):
                while len(table) * self.block_size < sequence.computed + count:
                    block = int(self.free[group].pop())
                    self.users[group][block] = 1
                    for cache in self.caches:
                        if cache.group == group:
                            cache.rows[block] = 0
                    table.append(block)
        slots = [
            [
                sequence.tables[group][position // self.block_size] * self.block_size + position % self.block_size
                for sequence, count in rows
                for position in range(sequence.computed, sequence.computed + count)
            ]
            + [-1] * padding
            for group in range(len(self.groups))
        ]
        counts = [count for _, count in rows] + [1] * padding
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        lengths = np.array([s.computed + count for s, count in rows] + [0] * padding, dtype=np.int32)
        columns = max([len(s.tables[0]) for s, _ in rows], default=1) + wide
        tables = []
        for group in range(len(self.groups)):
            table = torch.zeros(len(rows) + padding, columns, dtype=torch.int32)
            for row, (sequence, _) in enumerate(rows):
                table[row, : len(sequence.tables[group])] = torch.tensor(sequence.tables[group], dtype=torch.int32)
            tables.append(table)
        return StepMetadata(
            num_decode_rows=decodes + padding,
            query_start=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lengths),
            slot_mapping=tuple(torch.tensor(group, dtype=torch.int64) for group in slots),
            block_tables=tuple(tables),
            query_start_host=starts,
            seq_lens_host=lengths,
        )

    def _give_back(self, sequence: Seq) -> None:
        """Blocks behind every later token's window go."""
        for group in self.groups:
            if group.window is None:
                continue
            for index in range(group.first_seen(sequence.computed) // self.block_size):
                block = sequence.tables[group.index][index]
                if block:
                    self._drop(group.index, block)
                    sequence.tables[group.index][index] = 0

    def prefill(self, sequence: Seq, chunk: int | None = None) -> torch.Tensor:
        """All known tokens, ``chunk`` at a time: ``[len, vocab]``."""
        parts = []
        while sequence.computed < len(sequence.tokens):
            left = len(sequence.tokens) - sequence.computed
            parts.append(self.step([(sequence, min(chunk or left, left))]))
        return torch.cat(parts)

    def generate(
        self, prompts: list[list[int]], steps: int, chunk: int | None = None
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Greedy tokens and ``[steps, vocab]`` logits of each prompt; decodes run as one batch."""
        sequences = [self.sequence(prompt) for prompt in prompts]
        logits = [[self.prefill(sequence, chunk)[-1]] for sequence in sequences]
        for _ in range(steps - 1):
            for sequence, rows in zip(sequences, logits, strict=True):
                sequence.tokens.append(int(rows[-1].argmax()))
            out = self.step([(sequence, 1) for sequence in sequences], decodes=len(sequences))
            for index, rows in enumerate(logits):
                rows.append(out[index])
        return [[int(row.argmax()) for row in rows] for rows in logits], [torch.stack(rows) for rows in logits]


def in_company(model: Decoder, tokens: Sequence[list[int]], steps: int, *, padding: bool = False) -> list[torch.Tensor]:
    """Logits ``[steps, vocab]`` of the first prompt, of the second and of the first again, greedily in one cache: in chunks
    beside others, from another's blocks and state, and taken away and resumed.

    Args:
        padding: whether some steps have padding rows.
    """
    bench = Bench(model, block_size=4, seed=1)
    chunked, late = bench.sequence(tokens[0]), bench.sequence(tokens[1])
    bench.step([(chunked, 1)])
    bench.step([(chunked, 19), (late, 2)])
    hit = bench.share(chunked, tokens[0])
    bench.step([(late, 5), (hit, 6), (chunked, 4)], padding=2 * padding)
    bench.preempt(late)
    first = bench.step([(hit, 7), (late, 21), (chunked, 9)])
    got = [[first[6]], [first[27]], [first[36]]]
    rows = [hit, late, chunked]
    for step in range(1, steps):
        for sequence, logits in zip(rows, got, strict=True):
            sequence.tokens.append(int(logits[-1].argmax()))
        if step == 3:
            bench.preempt(hit)
            resumed = bench.step([(chunked, 1), (hit, len(hit.tokens)), (late, 1)])
            out = torch.stack((resumed[-2], resumed[-1], resumed[0]))
        else:
            out = bench.step([(sequence, 1) for sequence in rows], decodes=3, padding=step % 2 * padding)
        for logits, row in zip(got, out, strict=True):
            logits.append(row)
    return list(map(torch.stack, got))
