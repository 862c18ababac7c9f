"""The profile of a step: sums over kernels that overlap, gaps between them, and a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.models.tiny_llama import write_config

from bench.scripts import FOLDER, load

SCRIPT = FOLDER / "step_profile.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("step_profile")


def test_overlapping_kernels_count_once(script: ModuleType) -> None:
    spans = [script.Span("a", 0, 10), script.Span("b", 2, 4), script.Span("b", 8, 15), script.Span("a", 20, 25)]
    assert script.busy(spans) == 20
    told = script.on_gpu(spans, steps=5, top=10)
    assert (told["span_us"], told["busy_us"], told["idle_us"], told["launches"]) == (5.0, 4.0, 1.0, 0.8)
    assert told["top"][0] == {"name": "a", "us": 3.0, "calls": 0.4, "share": 15 / 24}
    assert told["gaps"] == [{"after": "b", "before": "a", "us": 1.0, "times": 0.2}]
    assert script.on_gpu([], steps=1, top=1)["busy_us"] == 0


def test_a_kernel_within_another_hides_no_gap(script: ModuleType) -> None:
    spans = [script.Span("long", 0, 10), script.Span("short", 1, 2), script.Span("next", 12, 13)]
    assert script.gaps(spans, 1, 5) == [{"after": "long", "before": "next", "us": 2, "times": 1.0}]


def test_settings_are_engine_arguments(script: ModuleType) -> None:
    assert script.setting("pipeline_depth=2") == ("pipeline_depth", 2)
    assert script.setting("dtype=float32") == ("dtype", "float32")
    for wrong in ("nonesuch=1", "dtype"):
        with pytest.raises(script.argparse.ArgumentTypeError, match="EngineArgs"):
            script.setting(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_run(phase: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "tiny")
    output = tmp_path / "profile.json"
    words = [str(folder), "--phase", phase, "--batch", "3", "--context", "40", "--steps", "6", "--json", str(output), "--host"]
    words += ["--set", "num_kv_blocks=128", "--set", "max_num_seqs=4", "--top", "400"]
    subprocess.run([sys.executable, str(SCRIPT), *words], check=True, timeout=120, stdout=subprocess.DEVNULL)
    report = json.loads(output.read_text())
    steps = report["step_ms"]
    assert steps["steps"] == (6 if phase == "decode" else 1)
    assert steps["wall"] >= steps["forward"] > 0 and steps["host"] > 0
    if phase == "decode":
        parts = report["host_ms"]
        assert 0 < parts["schedule"] < parts["whole"] and 0 <= parts["rest"] < parts["whole"]
    assert report["device"]["top"] and report["device"]["busy_us"] > 0
    assert any("engine/core.py" in row["name"] for row in report["host"])
