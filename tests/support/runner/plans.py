"""Plans written by hand, for what a scheduler would never ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.plan import NewSequence, Row, SamplePlan, StepPlan, pack_tokens
from headrace.sampling_params import SamplingParams
from support.runner.harness import BLOCK


def new(seq_id: int, slot: int, token_ids: Sequence[int], prompt_len: int | None = None, **sampling: Any) -> NewSequence:
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    length = len(token_ids) if prompt_len is None else prompt_len
    return NewSequence(seq_id, slot, pack_tokens(token_ids), length, params, 0, 0, [], None)


def row(seq_id: int, slot: int, start: int, count: int, blocks: Sequence[int] = (), *, logits: int = 1, groups: int = 1) -> Row:
    return Row(seq_id, slot, start, count, logits, (tuple(blocks),) * groups)


def plan(*rows: Row, new: Sequence[NewSequence] = (), released: Sequence[int] = (), decode: int = 0, step: int = 1) -> StepPlan:
    return StepPlan(step, tuple(released), tuple(new), tuple(rows), decode)


def blocks_for(length: int, first: int = 1) -> list[int]:
    return list(range(first, first - (-length // BLOCK)))


def masked(step: int, masks: Mapping[int, Sequence[bytes]]) -> SamplePlan:
    """``masks``: seq_id -> the masks of its logits rows."""
    seq_ids = [seq_id for seq_id, own in masks.items() for _ in own]
    return SamplePlan(step, seq_ids, memoryview(b"".join(mask for own in masks.values() for mask in own)))
