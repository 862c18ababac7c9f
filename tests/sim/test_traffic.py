"""Traffic: generated and from traces; configurations that make no sense."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.sim.examples import SHAPE, TIMES, run, traffic

from headrace.errors import ConfigError
from headrace.sim.config import FORMAT, Calibration, Lengths, Prefixes, load
from headrace.sim.step_time import Curve
from headrace.sim.traffic import generate, read_trace


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


def changed(value: Any, path: str, to: Any) -> None:
    """Sets what a path such as ``traffic.rate`` names."""
    *folders, name = path.split(".")
    for folder in folders:
        value = value[int(folder)] if isinstance(value, list) else value[folder]
    value[int(name) if isinstance(value, list) else name] = to


NUMBERS = [
    *("replicas", "max_queue_len", "seed", "message_seconds"),
    *("traffic.requests", "traffic.rate", "traffic.sessions", "traffic.prefixes.groups", "traffic.prefixes.tokens"),
    *("traffic.input_tokens.median", "traffic.input_tokens.max", "traffic.output_tokens.sigma"),
    *("failures.0.replica", "failures.0.at", "failures.0.down_seconds"),
    *(f"calibration.engine.{name}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")),
    *("calibration.engine.cache_bytes", "calibration.engine.groups.0.bytes_per_token"),
    *(f"calibration.step_times.{name}" for name in ("host_step", "decode.context", "decode.base.values.0")),
    *("calibration.step_times.mixed.residuals.0", "calibration.step_times.graphs.max_prompts"),
]


@pytest.mark.parametrize("path", NUMBERS)
def test_absurd_numbers_are_refused_or_end(path: str, tmp_path: Path) -> None:
    """No number makes a simulation endless or fills the memory, and time never runs backwards."""
    times = msgspec.to_builtins(TIMES)
    times["graphs"] = {"max_prompts": 1}
    times["mixed"]["residuals"] = [1.0] * 6
    lengths = {"median": 5, "sigma": 0.5, "max": 20}
    fields: dict[str, Any] = {
        "calibration": {"format": FORMAT, "engine": msgspec.to_builtins(SHAPE), "step_times": times},
        "replicas": 2,
        "traffic": {
            "requests": 3,
            "rate": 10,
            "input_tokens": lengths,
            "output_tokens": dict(lengths),
            "prefixes": {"groups": 2, "tokens": 8},
            "sessions": 2,
        },
        "failures": [{"replica": 0, "at": 0.1, "down_seconds": 0.1}],
    }
    for value in (0, -1, -0.5, 10**9, 10**18, 2**63, 10**30, 1e-300, 1e300):
        given = json.loads(json.dumps(fields))
        changed(given, path, value)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(given))
        try:
            simulated = run(load(file))
        except ConfigError as refused:
            assert path.rpartition(".")[2] in str(refused) or refused.param == "traffic" or path.endswith(".0")
            continue
        report = json.dumps(simulated.report())
        assert simulated.now >= 0 and "NaN" not in report and "Infinity" not in report


@pytest.mark.parametrize(
    "curve", [{"knots": [], "values": []}, {"knots": [1, 1], "values": [1, 2]}, {"knots": [1], "values": []}]
)
def test_curves_that_are_none_are_refused(curve: Any, tmp_path: Path) -> None:
    times = msgspec.to_builtins(TIMES)
    times["decode"]["base"] = curve
    calibration = {"format": FORMAT, "engine": msgspec.to_builtins(SHAPE), "step_times": times}
    with pytest.raises(ConfigError, match="base"):
        load(written(tmp_path, calibration=calibration))


def test_a_falling_curve_gives_no_negative_times() -> None:
    assert Curve([1, 2], [3.0, 1.0])(100) == 1.0


@pytest.mark.parametrize("name", ["/dev/zero", "folder", "pipe", "nested", "missing"])
def test_files_that_are_none_are_refused_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "nested").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    with pytest.raises(ConfigError):
        load(path)
    if name == "pipe":
        assert list(read_trace(path, 0, 100)) == []
        return
    with pytest.raises(ConfigError) as refused:
        read_trace(path, 0, 100)
    assert refused.value.param == "--trace"


def test_a_long_trace_keeps_no_prompts(tmp_path: Path) -> None:
    """Each prompt is made when its request arrives: a thousand of ten million tokens would take 80 GB."""
    line = {"at": 1.0, "input_tokens": 10_000_000, "output_tokens": 10}
    requests = read_trace(trace(tmp_path / "trace.jsonl", *[line] * 1000), 0, 100)
    assert sum(len(one.prompt_token_ids) for one in requests) == 1000 * 90
