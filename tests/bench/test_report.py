"""Percentiles, facts, and how they are printed."""

from __future__ import annotations

import json

from headrace.bench.report import as_json, facts
from headrace.metrics.exchanges import distribution


def test_distribution_is_in_milliseconds() -> None:
    found = distribution([0.001, 0.002, 0.003])
    assert found["mean"] == 2.0 and found["p50"] == 2.0 and found["max"] == 3.0
    assert distribution([]) == {}
    spread = distribution([number / 1e3 for number in range(101)])
    assert (spread["p50"], spread["p90"], spread["p99"], spread["mean"]) == (50.0, 90.0, 99.0, 50.0)


def test_facts_say_where_and_with_what() -> None:
    found = facts(0.25)
    assert found["load_before"] == 0.25
    assert {"date", "command", "machine", "versions"} <= set(found)
    assert found["machine"]["cpus_usable"] >= 1
    assert {"headrace", "python", "torch"} <= set(found["versions"])
    assert json.loads(as_json(found)) == found
