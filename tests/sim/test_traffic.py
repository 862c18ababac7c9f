"""Traffic: generated and from traces; configurations that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.sim.config import Calibration, Lengths, Prefixes, load
from headrace.sim.traffic import generate, read_trace

from .examples import SHAPE, TIMES, traffic


def test_generated_traffic_is_as_asked() -> None:
    asked = traffic(2000, rate=10.0, prefixes=Prefixes(4, 256, skew=1.0), sessions=3)
    requests = list(generate(asked, 1, 100_000))
    assert requests == list(generate(asked, 1, 100_000)) != list(generate(asked, 2, 100_000))
    assert requests[-1].arrival_time == pytest.approx(200, rel=0.1)
    lengths = sorted(len(request.prompt_token_ids) - 256 for request in requests)
    assert lengths[1000] == pytest.approx(200, rel=0.1) and lengths[-1] > 1500
    counts = {tuple(request.prompt_token_ids[:256]): 0 for request in requests}
    for request in requests:
        counts[tuple(request.prompt_token_ids[:256])] += 1
    assert len(counts) == 4 and max(counts.values()) > 1.7 * sorted(counts.values())[-2]
    assert {request.session for request in requests} == {"0", "1", "2"}
    assert all(request.max_tokens == request.sampling.max_tokens for request in requests)


def trace(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_traces_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "trace.jsonl",
        {"at": 2.0, "input_tokens": 100, "output_tokens": 5, "prefix": "a", "prefix_tokens": 64},
        "",
        {"at": 1.0, "input_tokens": 80, "output_tokens": 7, "prefix": "a", "prefix_tokens": 64, "session": 9},
        {"at": 3.0, "input_tokens": 5000, "output_tokens": 100},
    )
    first, second, third = read_trace(file, 0, 1000)
    assert (first.arrival_time, first.max_tokens, first.session) == (1.0, 7, "9")
    assert first.prompt_token_ids[:64] == second.prompt_token_ids[:64]
    assert first.prompt_token_ids[64:80] != second.prompt_token_ids[64:80]
    assert len(third.prompt_token_ids) == 900, "cut to the context"


def test_mooncakes_traces_are_read(tmp_path: Path) -> None:
    lines = [{"timestamp": 1500, "input_length": 1200, "output_length": 3, "hash_ids": ids} for ids in ([7, 8, 9], [7, 8, 5])]
    first, second = read_trace(trace(tmp_path / "trace.jsonl", *lines), 0, 10_000)
    assert first.arrival_time == 1.5 and len(first.prompt_token_ids) == 1200
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024] and first.prompt_token_ids != second.prompt_token_ids


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"at": 1, "input_tokens": 5}',
        '{"at": -1, "input_tokens": 5, "output_tokens": 1}',
        '{"at": 1, "input_tokens": 0, "output_tokens": 1}',
        '{"at": 1, "input_tokens": 1e14, "output_tokens": 1}',
        '{"at": true, "input_tokens": 5, "output_tokens": 1}',
        '{"at": NaN, "input_tokens": 5, "output_tokens": 1}',
        '{"at": 1, "input_tokens": 5, "output_tokens": 1, "prefix": "a"}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": 7}',
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    good = {"at": 1.0, "input_tokens": 1, "output_tokens": 1}
    with pytest.raises(ConfigError, match="line 2 of") as refused:
        list(read_trace(trace(tmp_path / "trace.jsonl", good, line), 0, 100))
    assert refused.value.param == "--trace"


def written(folder: Path, **fields: Any) -> Path:
    import msgspec

    calibration = msgspec.json.encode(Calibration(engine=SHAPE, step_times=TIMES))
    (folder / "engine.json").write_bytes(calibration)
    path = folder / "config.json"
    path.write_text(json.dumps({"calibration": "engine.json", **fields}))
    return path


def test_a_configuration_names_its_calibration_and_changes_it(tmp_path: Path) -> None:
    config = load(written(tmp_path, replicas=2, engine={"max_num_seqs": 7}))
    assert config.measured.engine.max_num_seqs == 7 and config.measured.step_times == TIMES
    assert config.measured.engine.capacity().kv_tokens == pytest.approx(64_000, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"replicas": 0}, "replicas"),
        ({"routing": "best"}, "routing"),
        ({"unknown": 1}, "unknown"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"engine": {"rows": 1}}, "rows"),
        ({"failures": [{"replica": 3, "at": 1, "down_seconds": 1}]}, "replica 3"),
        ({"calibration": "missing.json"}, "missing.json"),
        ({"traffic": {"requests": 1, "rate": 0, "input_tokens": {"median": 1}, "output_tokens": {"median": 1}}}, "rate"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        load(written(tmp_path, **fields))


def test_lengths_stay_within_their_maximum() -> None:
    asked = traffic(200, input_tokens=Lengths(100, 2.0, 300), output_tokens=Lengths(1))
    requests = list(generate(asked, 1, 10_000))
    assert max(len(one.prompt_token_ids) for one in requests) == 300 and {one.max_tokens for one in requests} == {1}
