"""Routing of hybrid models: a prefix counts up to the last state that the replica has of it."""

from __future__ import annotations

import random

from support.core.small_tiles import small_tiles
from support.core.world import World, make_cache, make_config, make_request
from support.sim.examples import config, run, traffic

from headrace.kv.events import BlockRemoved, BlockStored, events_of
from headrace.routing import CacheReport, CacheReporter, Capacity, Router, make_policy, prefix_keys
from headrace.sim.config import Lengths, Prefixes, StateShape

GRID = 4
CAPACITY = Capacity(rows=32, step_tokens=2048, kv_tokens=200_000, state_grid=GRID)
PROMPT = list(range(40, 80))


def routed(replicas: int) -> Router:
    router = Router(make_policy("prefix", replicas), replicas, GRID)
    for replica in range(replicas):
        router.start(replica, CAPACITY)
    return router


def test_kv_without_a_state_attracts_nothing() -> None:
    router = routed(2)
    keys = list(prefix_keys(make_request("keys", PROMPT), GRID, GRID))
    # Replica 0 has more KV, replica 1 a later state.
    router.cache_changed(0, CacheReport(False, keys, [], [keys[1]], []))
    router.cache_changed(1, CacheReport(False, keys[:7], [], [keys[4], keys[8]], []))
    router.add(make_request("one", PROMPT), 0.0)
    assert [binding.replica for binding in router.bind(0.0)] == [1]
    assert router.decisions[-1].expected_hit == 5 * GRID
    router.rejected("one")
    router.cache_changed(1, CacheReport(False, [], [], [], [keys[4]]))
    router.add(make_request("two", PROMPT), 0.0)
    assert [binding.replica for binding in router.bind(0.0)] == [0]
    assert router.decisions[-1].expected_hit == 2 * GRID
    router.stop(0)
    router.start(0, CAPACITY)
    router.pause(1)
    router.add(make_request("three", PROMPT), 0.0)
    assert list(router.bind(0.0)) and router.decisions[-1].expected_hit == 0


def test_a_state_is_expected_where_a_prompt_is_being_computed() -> None:
    """At the ends of its turns, and at the last place in the prompt."""
    router = routed(1)
    router.add(make_request("first", PROMPT, boundaries=(10, 30)), 0.0)
    for name, prompt, hit in (
        ("again", PROMPT, 36),
        ("another answer", [*PROMPT[:33], 1], 28),
        ("shared instructions", [*PROMPT[:12], 1, 2, 3], 8),
        ("nothing in common", [1, *PROMPT], 0),
    ):
        router.add(make_request(name, prompt), 0.0)
        assert [binding.request.request_id for binding in router.bind(0.0)][-1] == name
        assert router.decisions[-1].expected_hit == hit
        router.rejected(name)
    router.rejected("first")
    router.add(make_request("later", PROMPT), 0.0)
    assert list(router.bind(0.0)) and router.decisions[-1].expected_hit == 0


def test_what_a_replica_reports_is_what_it_finds() -> None:
    """Conversations and branches in a small cache, one request at a time: each hit is predicted to the token."""
    rng, router = random.Random(3), routed(1)
    with small_tiles():
        world = World(make_config(max_num_batched_tokens=32), make_cache(40, states=(1, 12, 5)))
        reporter, changes = CacheReporter(world.scheduler.kv), world.scheduler.kv.record_changes()
        told, hits = [list(PROMPT[:20])], 0
        for number in range(60):
            begun = rng.choice(told[-6:])
            prompt = [*begun[: rng.choice((len(begun), 12))], *(rng.randrange(1, 10) for _ in range(rng.randrange(1, 9)))][:50]
            request = make_request(f"{number}", prompt, max_tokens=6, boundaries=(8,))
            router.add(request, 0.0)
            assert list(router.bind(0.0))
            (seq,) = world.add(request)
            world.run()
            assert router.decisions[-1].expected_hit == seq.num_cached_tokens
            hits += seq.num_cached_tokens > 0
            if number == 40:
                world.scheduler.kv.reset_prefix_cache()
            if (report := reporter.report(changes)) is not None:
                router.cache_changed(0, report)
            changes.clear()
            router.progress(f"{number}", 0, 6, seq.num_cached_tokens, True)
            told.append(list(seq.token_ids))
    assert hits > 20 and router.stats[0].wrong_hit_tokens == 0
    world.assert_right()


def test_snapshots_are_events_of_their_own_group() -> None:
    """Each names its tokens; none looks like a block of KV, and none follows another."""
    with small_tiles():
        world = World(make_config(max_num_batched_tokens=32), make_cache(60, states=(1, 12, 2)))
        kv = world.scheduler.kv
        changes = kv.record_changes()
        for name, prompt in (("one", [*PROMPT[:20], 1, 1]), ("again", [*PROMPT[:20], 2, 2]), ("other", PROMPT[20:29])):
            world.add(make_request(name, prompt, max_tokens=2, boundaries=(17,) if len(prompt) > 17 else ()))
            world.run()
    events = events_of(changes, kv.block_size, kv.groups)
    states = [event for event in events if isinstance(event, BlockStored | BlockRemoved) and event.group_idx == 1]
    stored = [event for event in states if isinstance(event, BlockStored)]
    assert [event.num_tokens for event in stored] == [16, 20, 8]
    assert {event.kv_cache_spec_kind for event in stored} == {"mamba"}
    assert all(len(event.block_hashes) == 1 for event in stored)
    assert [event.token_ids for event in stored] == [PROMPT[12:16], PROMPT[16:20], PROMPT[24:28]]
    blocks = [event for event in events if isinstance(event, BlockStored) and event.group_idx == 0]
    assert all(event.num_tokens is None for event in blocks)
    known = {name for event in blocks for name in event.block_hashes}
    assert all(set(event.block_hashes) < known for event in stored), "a snapshot has the key of the KV block that ends there"
    assert states[2:] and isinstance(states[2], BlockRemoved), "the budget is two snapshots"


def test_simulated_replicas_share_traffic_by_their_states() -> None:
    """A state takes as much memory as 512 tokens; shared prefixes are found up to the snapshots."""
    engine = {"states": StateShape(bytes=512, snapshot_bytes=8 * 512, grid=64), "cache_bytes": 16 * 1001}
    shared = traffic(60, 90.0, prefixes=Prefixes(groups=10, tokens=512), input_tokens=Lengths(50, 0.5))
    reports = {}
    for policy in ("prefix", "random"):
        simulation = run(config(engine, replicas=2, routing=policy, traffic=shared))
        reports[policy] = simulation.report()
        assert reports[policy]["requests"]["succeeded"] == 60
        for replica in simulation.replicas:
            assert replica.scheduler.kv.states is not None
            assert replica.scheduler.kv.states.num_findable <= 8
    found = {
        policy: sum(one["requests"] * one["prefix_hit_rate"] for one in report["by_replica"])
        for policy, report in reports.items()
    }
    assert found["prefix"] > 1.2 * found["random"] > 0
    assert all(one["prefix_attention_rate"] >= one["prefix_hit_rate"] for one in reports["prefix"]["by_replica"])
