"""Policies: who goes first."""

from __future__ import annotations

from typing import Protocol

from headrace.config import Policy as PolicyName
from headrace.core.sequence import Sequence, Status


class Policy(Protocol):
    """Sorts sequences into classes; within a class the earlier arrival goes first."""

    def rank(self, seq: Sequence) -> int:
        """The sequence's class: lower goes first, and is preempted last."""
        ...


class FirstComeFirstServed:
    """One class for all."""

    def rank(self, seq: Sequence) -> int:
        return 0


class Priority:
    """A class a priority: as long as sequences of a lower value want to run, those of a higher one may wait."""

    def rank(self, seq: Sequence) -> int:
        return seq.request.priority


def make_policy(name: PolicyName) -> Policy:
    policies: dict[PolicyName, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
    return policies[name]()


def running_order(policy: Policy, seq: Sequence) -> tuple[int, int]:
    """Sort key of running sequences: the last one is the first to be preempted."""
    return policy.rank(seq), seq.seq_id


def waiting_order(policy: Policy, seq: Sequence) -> tuple[int, bool, int]:
    """Sort key of waiting sequences: a preempted one comes back at the front of its class."""
    return policy.rank(seq), seq.status is not Status.PREEMPTED, seq.seq_id
