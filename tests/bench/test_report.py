"""Percentiles, facts, and how they are printed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.report import as_json, distribution, facts, percentile


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_distribution_is_in_milliseconds() -> None:
    found = distribution([0.001, 0.002, 0.003])
    assert found["mean"] == 2.0 and found["p50"] == 2.0 and found["max"] == 3.0
    assert distribution([]) == {}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_facts_say_where_and_with_what() -> None:
    found = facts(0.25)
    assert found["load_before"] == 0.25
    assert {"date", "command", "machine", "versions"} <= set(found)
    assert found["machine"]["cpus_usable"] >= 1
    assert {"headrace", "python", "torch"} <= set(found["versions"])
    assert json.loads(as_json(found)) == found
