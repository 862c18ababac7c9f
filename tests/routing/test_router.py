"""The router's queue and book, against a model of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.routing_world import BLOCK, CAPACITY, request, router

from headrace.choices import RoutingPolicy
from headrace.core.request import Request
from headrace.errors import EngineDeadError, QueueFullError, RequestError
from headrace.routing import STRIDE, CacheReport, Capacity, RoutedPrefixes, Router, prefix_keys

SMALL = Capacity(rows=2, step_tokens=64, kv_tokens=4096)
"""Takes 3 requests: 2 rows and a runway of 1."""


def bound(one: Router, now: float = 0.0) -> list[tuple[str, int]]:
    return [(binding.request.request_id, binding.replica) for binding in one.bind(now)]


def test_what_the_replicas_have_no_room_for_waits_in_order() -> None:
    one = router("least-tokens", 2, SMALL, by_priority=True)
    for number, priority in enumerate([1, 1, 1, 1, 1, 1, 1, 0, 1]):
        one.add(request(f"r{number}", [1], priority=priority), 0.0)
    sent = dict(bound(one))
    assert len(sent) == 6 and "r7" in sent and sorted(one.queued) == ["r5", "r6", "r8"]
    assert one.num_queued == 3
    one.progress("r0", 0, 1, 0, True)
    assert len(bound(one)) == 1 and one.num_queued == 2


def test_a_request_that_waits_moves_to_an_idler_replica() -> None:
    one = router("prefix", 2, SMALL)
    one.stop(1)
    for number in range(5):
        one.add(request(f"r{number}", [number] * 20), 0.0)
    assert bound(one) == [("r0", 0), ("r1", 0), ("r2", 0)] and one.loads.rows == [5, 0]
    one.start(1, SMALL)
    assert bound(one) == [("r3", 1), ("r4", 1)] and one.decisions[-1].moved
    assert one.loads.rows == [3, 2] and one.loads.prefill == [60, 40]


def test_a_request_whose_prefix_is_cached_waits_for_it() -> None:
    """Computing the prefix again elsewhere would take longer than the wait."""
    one = router("prefix", 2, SMALL._replace(step_tokens=10_000))
    one.stop(1)
    for number in range(5):
        one.add(request(f"r{number}", [7] * 3000 + [number]), 0.0)
    assert len(bound(one)) == 3
    one.progress("r0", 0, 1, 0, False)
    one.start(1, SMALL)
    assert bound(one) == [] and len(one.queued) == 2


def test_a_step_of_prompts_and_the_next_is_sent() -> None:
    one = router("least-tokens", 1, CAPACITY._replace(step_tokens=100))
    for number in range(6):
        one.add(request(f"r{number}", [1] * 90), 0.0)
    assert [name for name, _ in bound(one)] == ["r0", "r1", "r2"]
    one.loads.observe(0, 100)
    assert one.loads.prefill == [540 - 100] and [name for name, _ in bound(one)] == ["r3"]
    one.progress("r0", 0, 1, 0, False)
    assert one.loads.prefill == [540 - 100], "90 of the computed tokens were those of r0, 10 are of r1"


def test_an_idle_replica_takes_what_exceeds_its_budgets() -> None:
    one = router("prefix", 1, SMALL)
    one.add(request("long", [1] * 5000, n=5), 0.0)
    assert bound(one) == [("long", 0)]
    one.add(request("next", [1]), 0.0)
    assert bound(one) == []


def test_a_rejected_request_leaves_the_budget_as_it_was() -> None:
    one = router("prefix", 2, SMALL)
    one.add(request("a", [1] * 200), 0.0)
    ((_, replica),) = bound(one)
    one.rejected("a")
    assert one.loads.rows == one.loads.prefill == one.loads.context == [0, 0]
    assert one.stats[replica].accepted == 0
    one.add(request("b", [1] * 200), 0.0)
    assert len(bound(one)) == 1
    assert one.decisions[-1].expected_hit == 0, "nothing of the refused prompt was computed"


def test_the_queue_is_bounded() -> None:
    one = router("prefix", 1, SMALL, max_queue_len=4)
    for number in range(3):
        one.add(request(f"r{number}", [1]), 0.0)
    assert len(bound(one)) == 3
    with pytest.raises(RequestError) as refused:
        one.add(request("wide", [1], n=5), 0.0)
    assert refused.value.param == "n" and not isinstance(refused.value, QueueFullError)
    one.add(request("a", [1], n=3), 0.0)
    with pytest.raises(QueueFullError):
        one.add(request("b", [1], n=2), 0.0)
    assert one.num_queued == 3 and one.remove("a") is not None and one.num_queued == 0 and one.remove("a") is None


def test_requests_expire() -> None:
    one = router("prefix", 1, SMALL)
    for number in range(6):
        one.add(request(f"r{number}", [1]), float(number))
    bound(one)
    assert one.oldest() == 3.0 and one.expired(3.5) == ["r3"] and one.expired(3.5) == [] and one.oldest() == 4.0


def test_a_replica_that_died_takes_its_own_along() -> None:
    one = router("round-robin", 2)
    for number in range(6):
        one.add(request(f"r{number}", [1]), 0.0)
    bound(one)
    assert one.stop(0) == ["r0", "r2", "r4"] and one.loads.rows == [0, 3]
    one.add(request("r0", [1]), 0.0)
    assert bound(one) == [("r0", 1)]
    one.stop(1)
    with pytest.raises(EngineDeadError):
        one.add(request("r9", [1]), 0.0)
    one.start(0, CAPACITY)
    one.add(request("r9", [1]), 0.0)
    assert bound(one) == [("r9", 0)]


def test_those_that_wait_for_a_replica_that_died_go_to_the_others() -> None:
    one = router("session", 2, SMALL)
    for number in range(8):
        one.add(request(f"r{number}", [1], session="mine"), 0.0)
    (replica,) = {replica for _, replica in bound(one)}
    assert len(one.queued) == 5
    assert one.stop(replica) == ["r0", "r1", "r2"]
    assert [number for _, number in bound(one)] == [1 - replica] * 3
    assert one.stop(1 - replica) == ["r3", "r4", "r5", "r6", "r7"], "no replica is left for those that wait"
    assert one.num_queued == 0 and one.loads.rows == one.loads.prefill == one.loads.context == [0, 0]


def prompts(*groups: int, length: int = 4 * STRIDE) -> list[list[int]]:
    return [[group] * length + [number] for number, group in enumerate(groups)]


def computed(one: Router, name: str, prompt: list[int], cached: int = 0) -> None:
    """The replica computes a prompt, and reports that before the first token."""
    one.cache_changed(0, CacheReport(False, list(prefix_keys(request(name, prompt), BLOCK)), []))
    one.progress(name, 0, 1, cached, True)


def expected(one: Router, name: str, prompt: list[int]) -> int:
    one.add(request(name, prompt), 0.0)
    bound(one)
    one.rejected(name)
    return one.decisions[-1].expected_hit


def test_the_index_has_what_the_replica_reports() -> None:
    one = router("prefix", 1)
    for number, prompt in enumerate(prompts(1, 2, 3)):
        one.add(request(f"r{number}", prompt), 0.0)
        bound(one)
        computed(one, f"r{number}", prompt)
    keys = prefix_keys(request("x", [2] * 600), BLOCK)
    one.cache_changed(0, CacheReport(False, [], list(keys[2:])))
    hits = [expected(one, f"again {group}", [group] * 600) for group in (1, 2, 3, 4)]
    assert hits == [4 * STRIDE, 2 * STRIDE, 4 * STRIDE, 0]
    generated = prefix_keys(request("x", [1] * 600 + [9] * 200), BLOCK)
    one.cache_changed(0, CacheReport(False, list(generated), []))
    assert expected(one, "next turn", [1] * 600 + [9] * 200) == 6 * STRIDE, "answers are found too"
    one.cache_changed(0, CacheReport(True, list(keys[:1]), []))
    assert [expected(one, f"last {group}", [group] * 600) for group in (1, 2)] == [0, STRIDE]


def test_a_prefix_that_is_being_computed_is_expected() -> None:
    one = router("prefix", 1)
    for number, prompt in enumerate(prompts(1, 2, 2)):
        one.add(request(f"r{number}", prompt), 0.0)
    bound(one)
    assert [decision.expected_hit for decision in one.decisions] == [0, 0, 4 * STRIDE]
    # The cache had no room for it: nothing is reported.
    one.progress("r0", 0, 1, 0, True)
    assert expected(one, "again", [1] * 600) == 0 and expected(one, "other", [2] * 600) == 4 * STRIDE


def test_a_prompt_that_was_never_computed_is_forgotten() -> None:
    one = router("prefix", 1)
    one.add(request("a", [1] * 600), 0.0)
    bound(one)
    one.progress("a", 0, 0, 0, True)
    one.add(request("b", [1] * 600), 0.0)
    bound(one)
    assert one.decisions[-1].expected_hit == 0


def test_the_index_finds_the_longest_prefix_of_each_replica() -> None:
    rng = random.Random(8)
    for _ in range(200):
        index = RoutedPrefixes(6)
        for replica in range(6):
            index.start(replica, 10_000)
        keys = [bytes([place]) for place in range(rng.randrange(1, 20))]
        depth = {replica: rng.randrange(len(keys) + 1) for replica in range(6)}
        for replica, count in depth.items():
            index.add(replica, keys[:count])
        assert dict(index.hits(keys)) == {replica: count for replica, count in depth.items() if count}


def test_the_index_of_a_silent_replica_is_bounded_and_loses_ends_first() -> None:
    index = RoutedPrefixes(1)
    index.start(0, 8 * STRIDE)
    first, second = ([bytes([group, place]) for place in range(6)] for group in range(2))
    for keys in (first, second):
        index.add(0, keys)
        assert index.send(0, keys) == 0
        index.remove(0, keys, sent=True, computed=True)
    assert index.size(0) == 8
    assert index.hits(first) == [(0, 2)] and index.hits(second) == [(0, 6)]
    index.start(0)
    assert index.hits(first) == index.hits(second) == [] and not index._holders


class Model:
    """State that the router must know at any time, kept in the simplest way."""

    def __init__(self, router: Router, replicas: int) -> None:
        self.router = router
        self.up = [True] * replicas
        self.waiting: dict[str, Request] = {}
        self.sent: dict[str, Sent] = {}

    def bind(self, now: float) -> None:
        for one, replica in self.router.bind(now):
            assert self.up[replica]
            decision = self.router.decisions[-1]
            assert (decision.request_id, decision.replica) == (one.request_id, replica)
            del self.waiting[one.request_id]
            self.sent[one.request_id] = Sent(one, replica, len(one.prompt_token_ids) - decision.expected_hit)

    def check(self) -> None:
        router, loads = self.router, self.router.loads
        assert sorted(router.queued) == sorted(self.waiting)
        assert router.num_queued == sum(one.sampling.n for one in self.waiting.values())
        for replica, up in enumerate(self.up):
            mine = [sent for sent in self.sent.values() if sent.replica == replica]
            queue = router._queues[replica]
            assert queue == sorted(queue)
            assert loads.rows[replica] == sum(len(sent.open) for sent in mine) + sum(entry.rows for entry in queue)
            assert loads.context[replica] == sum(sent.prompt + sum(sent.open.values()) for sent in mine)
            queued = sum(entry.prefill for entry in queue)
            assert queued <= loads.prefill[replica] <= queued + sum(sent.prompt for sent in mine if not sent.started)
            assert loads.up[replica] == up and (up or not (loads.open[replica] or mine or queue))
            if up and not mine:
                assert loads.open[replica]
            assert not (loads.open[replica] and queue), "nothing waits for a replica that has room"
            if router._index is not None:
                waiting = [key for entry in queue for key in entry.keys]
                computing = [key for sent in mine if not sent.started for key in sent.keys]
                assert router._index._computing[replica] == Counter(computing)
                assert router._index._pending[replica] == Counter(waiting + computing)
        assert loads.num_open == sum(loads.open) and loads.num_up == sum(self.up)


class Sent:
    def __init__(self, one: Request, replica: int, prompt: int) -> None:
        self.keys = prefix_keys(one, BLOCK)
        self.replica = replica
        self.prompt = prompt
        self.open = dict.fromkeys(range(one.sampling.n), 0)
        self.started = False


def operations(count: int, seed: int, policy: RoutingPolicy) -> None:
    """Random events in random order; after each the router's loads are the sums over what it has."""
    rng = random.Random(seed)
    router_ = router(policy, 4, SMALL, by_priority=True, max_queue_len=50)
    model = Model(router_, 4)
    for number in range(count):
        kind = rng.random()
        if kind < 0.35:
            arrive(model, rng, number)
        elif kind < 0.8 and model.sent:
            step(model, rng, rng.choice(list(model.sent)))
        elif kind < 0.83 and model.waiting:
            name = rng.choice(list(model.waiting))
            assert router_.remove(name) is model.waiting.pop(name)
        elif kind < 0.85 and model.sent:
            name = rng.choice(list(model.sent))
            router_.rejected(name)
            del model.sent[name]
        elif kind < 0.88:
            flip(model, rng.randrange(4))
        elif kind < 0.92:
            router_.loads.observe(rng.randrange(4), rng.randrange(1000))
        elif kind < 0.93:
            limit = number - 100.0
            late = {name for name, one in model.waiting.items() if one.arrival_time <= limit}
            assert set(router_.expired(limit)) == late
            for name in late:
                del model.waiting[name]
        model.bind(float(number))
        model.check()


def arrive(model: Model, rng: random.Random, number: int) -> None:
    prompt = [rng.randrange(3)] * rng.choice([1, 50, 130, 300, 600])
    fields = {"n": rng.choice([1, 1, 1, 3]), "priority": rng.randrange(2), "session": rng.choice("abc")}
    one = request(f"r{number}", prompt, arrival_time=float(number), **fields)
    try:
        model.router.add(one, float(number))
        model.waiting[one.request_id] = one
    except QueueFullError:
        assert model.router.num_queued + one.sampling.n > 50
    except EngineDeadError:
        assert not any(model.up)


def step(model: Model, rng: random.Random, name: str) -> None:
    sent = model.sent[name]
    index, tokens, ends = rng.choice(list(sent.open)), rng.choice([0, 1, 1, 3]), rng.random() < 0.4
    model.router.progress(name, index, tokens, rng.choice([0, 16]), ends)
    sent.started |= tokens > 0
    sent.open[index] += tokens
    if ends:
        del sent.open[index]
        if not sent.open:
            del model.sent[name]


def flip(model: Model, replica: int) -> None:
    """Kills or starts a replica."""
    model.up[replica] = not model.up[replica]
    if model.up[replica]:
        model.router.start(replica, SMALL)
        return
    lost = {name for name, sent in model.sent.items() if sent.replica == replica}
    waiting = set() if any(model.up) else set(model.waiting)
    assert set(model.router.stop(replica)) == lost | waiting
    for name in lost:
        del model.sent[name]
    for name in waiting:
        del model.waiting[name]


@pytest.mark.parametrize("policy", ["prefix", "least-tokens", "session"])
def test_random_operations(policy: RoutingPolicy) -> None:
    operations(10_000, 9, policy)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", ["prefix", "least-tokens", "session", "round-robin", "random"])
def test_many_random_operations(policy: RoutingPolicy) -> None:
    for seed in range(20):
        operations(10_000, 100 + seed, policy)
