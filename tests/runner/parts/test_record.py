"""The record of plans: its file, and what it can be replayed on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from support.runner.harness import World, prompt
from support.runner.plans import new, plan, row

from headrace.core.plan import GraphCount, RunnerEvent, SamplePlan, encode_plan
from headrace.errors import ConfigError
from headrace.runner.parts.record import Recorder, fingerprint
from headrace.runner.replay import read_plans, replay

PLANS = [
    plan(row(1, 0, 0, 3, [1]), new=[new(1, 0, prompt(1, 3), temperature=1.0, logit_bias={3: 1.5})], step=1),
    plan(row(1, 0, 3, 1), decode=1, step=2),
    plan(released=[0], step=3),
]


def recorded(path: Path) -> Path:
    recorder = Recorder(path, World().config())
    for each in PLANS:
        recorder.note(each)
    recorder.close()
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    header, plans = read_plans(recorded(tmp_path / "plans"))
    assert list(plans) == PLANS
    assert header.fingerprint == fingerprint(World().config())


def test_plans_are_in_the_file_before_the_recorder_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "plans", World().config())
    recorder.note(PLANS[0])
    assert list(read_plans(tmp_path / "plans")[1]) == PLANS[:1]
    recorder.close()


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    """The engine that a crash is followed by records beside the record of the crash."""
    path = recorded(tmp_path / "plans.bin")
    first = path.read_bytes()
    for _ in range(2):
        recorded(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plans.bin", "plans.bin.1", "plans.bin.2"]
    assert path.read_bytes() == first
    assert list(read_plans(tmp_path / "plans.bin.2")[1]) == PLANS


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no program reads"):
        Recorder(tmp_path / "pipe", World().config())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"/dev/full: No space left") as caught:
        Recorder("/dev/full", World().config())
    assert caught.value.param == "record_steps"
    recorder = Recorder(tmp_path / "plans", World().config())
    recorder.note(PLANS[0])
    before, recorder._file = recorder._file, open("/dev/full", "wb")  # noqa: SIM115
    for each in PLANS[1:]:
        recorder.note(each)
    recorder.close()
    recorder.close()
    assert before is not None
    before.close()
    assert ["before step 2" in record.message for record in caplog.records if record.levelname == "ERROR"] == [True]
    assert list(read_plans(tmp_path / "plans")[1]) == PLANS[:1]


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_record_cut_off_is_read_to_its_last_whole_plan(tmp_path: Path, cut: int) -> None:
    path = recorded(tmp_path / "plans")
    path.write_bytes(path.read_bytes()[:-cut])
    found = list(read_plans(path)[1])
    assert found == PLANS[: len(found)] and len(found) == 2


@pytest.mark.parametrize("content", [b"", b"\x01", b"no record at all", b"\x02\x00\x00\x00\x81\xa1"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ConfigError, match="no recorded steps"):
        read_plans(tmp_path / "other")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plans(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be recorded"):
        World(record=str(tmp_path / "none" / "plans")).runner()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (World("mistral"), "model"),
        (World(num_blocks=401), "cache"),
        (World(max_num_seqs=3), "max_num_seqs"),
        (World(backend="reference"), "attention_backends"),
    ],
)
def test_a_replay_elsewhere_names_what_differs(tmp_path: Path, other: World, named: str) -> None:
    path = recorded(tmp_path / "plans")
    with pytest.raises(ConfigError, match=named) as caught:
        replay(path, other.runner())
    assert "dtype" not in caught.value.message


def test_a_replay_records_nothing(tmp_path: Path) -> None:
    path = recorded(tmp_path / "plans")
    runner = dataclasses.replace(World(), record=str(tmp_path / "second")).runner()
    assert len(list(replay(path, runner))) == 3
    assert list(read_plans(tmp_path / "second")[1]) == []


class Graphs:
    """Graphs of which two may be captured."""

    def __init__(self) -> None:
        self.captured = 0

    def count(self) -> GraphCount:
        return GraphCount(self.captured, 2)

    def capture_next(self) -> GraphCount:
        self.captured = min(2, self.captured + 1)
        return self.count()

    def shape_of(self, rows: object, adapters: bool) -> None:
        return None

    def sample_shape_of(self, rows: object, masks: object) -> None:
        return None


def test_when_graphs_were_captured_is_recorded_and_replayed(tmp_path: Path) -> None:
    """A clock decides how many there are before a step, and a captured step computes with padding rows."""
    path = tmp_path / "plans"
    runner = World(record=str(path)).runner()
    runner._graphs = Graphs()
    runner.capture_next()
    for number, each in enumerate(PLANS):
        step = runner.execute(each)
        runner.sample(step, SamplePlan(each.step))
        runner.collect(step)
        if number == 0:
            for _ in range(3):
                runner.capture_next()
    runner.close()
    capture = RunnerEvent("capture")
    assert list(read_plans(path)[1]) == [capture, PLANS[0], capture, *PLANS[1:]]
    again = World().runner()
    again._graphs = graphs = Graphs()
    seen = []
    for result in replay(path, again):
        seen.append((result.step, graphs.captured))
    assert seen == [(1, 1), (2, 2), (3, 2)]


def test_a_replay_ends_where_weights_were_updated(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "plans", World().config())
    for each in (*PLANS[:2], RunnerEvent("weights"), PLANS[2]):
        recorder.note(each)
    recorder.close()
    results = replay(tmp_path / "plans", World().runner())
    assert [next(results).step, next(results).step] == [1, 2]
    with pytest.raises(ConfigError, match="weights were updated after step 2"):
        next(results)


def test_prompt_tokens_are_bytes_in_a_plan() -> None:
    long = plan(new=[new(1, 0, range(100_000, 200_000))])
    assert len(encode_plan(long)) < 4 * 100_000 + 200
