"""Profiles of earlier starts: found by a start that is like them, and by no other."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_memory import HELD, OTHERS, TOTAL, gpu
from support.resolving import GIB, HOPPER
from support.runner.harness import World, model

from headrace.parallel.agreement import OneProcess
from headrace.startup import known
from headrace.startup.known import profiled
from headrace.startup.profile import Profile

__all__ = ["gpu"]

MEASURED = Profile(TOTAL, OTHERS, HELD, activations=5 * GIB, workspaces=GIB, libraries=GIB // 2)


class Starts:
    """Starts of engines on one machine, and how many of them measured a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = 0
        self.model, self.config, self.device = model("llama"), World().config(), HOPPER
        self.encode: list[Callable[[], object]] = []
        monkeypatch.setattr(known, "measure", self._measure)
        monkeypatch.setattr("headrace.kernels.support.compute_capability", lambda device: 90)

    def _measure(self, *given: Any) -> Profile:
        self.measured += 1
        return MEASURED

    def start(self, ranks: Any = None) -> tuple[Profile, bool]:
        return profiled(self.model, self.config, self.device, ranks or OneProcess(), self.encode)


@pytest.fixture
def starts(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton").mkdir()
    return Starts(monkeypatch)


def test_a_second_start_measures_nothing(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts.start() == (MEASURED, False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(known.__file__).parent))
    # Another free memory now, and what follows from it.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (TOTAL - OTHERS - 10 * GIB, TOTAL))
    config = starts.config
    starts.config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, nbytes=config.cache.nbytes * 2))
    # And what the collector has not found yet.
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: HELD + 2**14)
    found, is_known = starts.start()
    assert is_known and starts.measured == 1
    total = int(config.args.gpu_memory_utilization * TOTAL)
    # Libraries take as much again as they took for the step, beside what others have by now.
    others = OTHERS + GIB + GIB // 2
    assert found == dataclasses.replace(MEASURED, total=total, others=others, held=HELD + 2**14)


def other_config(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = dataclasses.replace(starts.config.scheduler, max_num_batched_tokens=77)
    starts.config = dataclasses.replace(starts.config, scheduler=scheduler)


def other_option(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.config = dataclasses.replace(starts.config, args=dataclasses.replace(starts.config.args, enforce_eager=True))


def other_dtype(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.model = copy.deepcopy(model("llama")).to(torch.bfloat16)


def other_device(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.device = dataclasses.replace(HOPPER, name="another")


def other_weights(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: HELD + 2 * known._GRAIN)


def other_variable(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def other_library(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "torch" else version(name))


def other_driver(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_DRIVER", Path(__file__))


def other_code(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.__path__", [str(Path(__file__).parent)])


def no_kernels(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")


def an_encoder(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another library's, as models may be."""
    starts.encode.append(int)


OTHERWISE = (
    *(other_config, other_option, other_dtype, other_device, other_weights, other_variable, other_library, other_driver),
    *(other_code, no_kernels, an_encoder),
)


@pytest.mark.parametrize("change", OTHERWISE)
def test_a_start_that_differs_measures(change: Any, starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.start()
    with monkeypatch.context() as changed:
        change(starts, changed)
        assert starts.start() == (MEASURED, False) and starts.measured == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"activations":-1,"workspaces":0,"vision":0,"libraries":0}', b"\xff"])
def test_a_damaged_profile_is_measured_again(content: bytes, starts: Starts, tmp_path: Path) -> None:
    starts.start()
    (file,) = (tmp_path / "headrace" / "profiles").iterdir()
    file.write_bytes(content)
    assert starts.start() == (MEASURED, False)
    assert starts.start()[1] and starts.measured == 2


def test_ranks_measure_together(starts: Starts) -> None:
    class Another(OneProcess):
        def any(self, flag: bool) -> bool:
            return True

    starts.start()
    assert starts.start(Another()) == (MEASURED, False) and starts.measured == 2


def test_a_model_of_another_library_leaves_nothing(starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        pass

    def start() -> bool:
        foreign: Any = Foreign()
        return profiled(foreign, starts.config, starts.device, OneProcess(), [])[1]

    assert not start() and not start()
    assert known.dry_run(Foreign(), starts.device, 1) is None  # type: ignore[arg-type]
    assert not (tmp_path / "headrace").exists()


def test_kernels_are_compiled_ahead_for_one_rank(starts: Starts) -> None:
    assert known.dry_run(starts.model, starts.device, 1) is not None
    assert known.dry_run(starts.model, starts.device, 2) is None
