"""Scheduling policies: the order of running and waiting sequences."""

from __future__ import annotations

from headrace.choices import Policy
from headrace.core.sequence import Sequence, Status


def running_order(policy: Policy, seq: Sequence) -> tuple[int, int]:
    """Sort key of running sequences: the last one is the first to be preempted."""
    return _priority(policy, seq), seq.seq_id


def waiting_order(policy: Policy, seq: Sequence) -> tuple[int, bool, int]:
    """Sort key of waiting sequences: a preempted one comes back before all others of its priority."""
    return _priority(policy, seq), seq.status is not Status.PREEMPTED, seq.seq_id


def _priority(policy: Policy, seq: Sequence) -> int:
    """A lower value goes first and is preempted last, whatever the order of arrival."""
    return seq.request.priority if policy == "priority" else 0
