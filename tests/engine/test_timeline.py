"""Nothing of a start-up is left out of its timeline, and none of its processes imports what it does not need."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import AsyncLLM
from headrace.config import EngineArgs
from headrace.engine.timeline import Timeline
from headrace.host.clock import clock, process_start
from headrace.processes.spawn import spawn
from headrace.text.fast_tokenizer import from_directory

HEAVY = (
    "torch",
    "transformers.models",
    "transformers.tokenization_utils_base",
    "sympy",
    "scipy",
    "pandas",
    "openai",
)
"""Modules that no server's process may import. Its chat templates are transformers' to render, which needs none of these."""
HEAVY_ENGINE = ("transformers", "huggingface_hub", "sympy", "torch._dynamo", "torch._inductor", "fastapi", "rich", "gguf")
"""Modules that no engine's process may import for a native model in Hugging Face's layout."""


def run(code: str, *arguments: str) -> str:
    whole = f"import sys\nsys.path[:0] = {sys.path!r}\n{code}"
    return subprocess.run([sys.executable, "-c", whole, *arguments], capture_output=True, text=True, check=True).stdout


def keep_tokenizer(folder: Path) -> None:
    """transformers converts a directory's tokenizer once."""
    from_directory(folder)


def test_phases_follow_each_other_from_the_origin() -> None:
    origin = clock() - 2.0
    timeline = Timeline(origin=origin)
    timeline.mark("command", at=origin + 1.5)
    time.sleep(0.01)
    with timeline.phase("weights") as phase:
        phase.detail = "some"
    timeline.mark("late", at=origin)
    names, seconds = zip(*((phase.name, phase.seconds) for phase in timeline.phases), strict=True)
    assert names == ("command", "weights", "late")
    assert seconds[0] == pytest.approx(1.5) and seconds[1] >= 0.5 and seconds[2] == 0
    assert sum(seconds) == pytest.approx(clock() - origin, abs=0.1)


def test_a_process_knows_when_it_began() -> None:
    before = clock()
    began, now = map(float, run("from headrace.host.clock import *\nprint(process_start(), clock())").split())
    # The system counts in hundredths of a second.
    assert before - 0.02 <= began < now <= clock()
    assert process_start() < before


def test_the_timeline_covers_the_wall_clock(tiny_folder: Path) -> None:
    async def work() -> None:
        args = EngineArgs(model=str(tiny_folder), load_format="dummy", num_kv_blocks=100, num_threads=1)
        begin = clock()
        llm = AsyncLLM(args, spawned=spawn(origin=begin))
        try:
            await llm.start()
            llm.serving()
            wall = clock() - begin
            names = [phase.name for phase in llm.info.timeline]
            assert names == ["command", "imports", "tokenizer", "config", "weights", "cache", "warm-up", "server"]
            assert 0.95 * wall <= sum(phase.seconds for phase in llm.info.timeline) <= wall
        finally:
            await llm.close()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_what_the_engines_process_imports(tiny_folder: Path) -> None:
    keep_tokenizer(tiny_folder)
    code = """
from headrace.config import EngineArgs
from headrace.processes import process
from headrace.processes.load import load_core
from headrace.engine.timeline import Timeline
core, _ = load_core(EngineArgs(model=sys.argv[1], load_format="dummy", num_kv_blocks=100, num_threads=1), Timeline())
core.close()
print(*sys.modules)
"""
    assert not set(HEAVY_ENGINE) & set(run(code, str(tiny_folder)).split())


def test_what_the_servers_process_imports(tiny_folder: Path) -> None:
    keep_tokenizer(tiny_folder)
    code = """
from headrace.config import EngineArgs
from headrace.cli import main
from headrace.cli.startup import AnnouncedLLM
from headrace.startup.text import load_text
from headrace.server import run
load_text(EngineArgs(model=sys.argv[1], load_format="dummy"), prepared=True)
print(*sys.modules)
"""
    assert not set(HEAVY) & set(run(code, str(tiny_folder)).split())


def test_the_process_is_spawned_before_anything_is_imported() -> None:
    loaded = set(run("from headrace.cli import main, serve\nprint(*sys.modules)").split())
    assert not {"torch", "transformers", "fastapi", "zmq", "numpy", "tokenizers", "openai", "rich"} & loaded


def test_the_core_is_imported_without_pytorch() -> None:
    """Tests start many processes around a runner without a model, and PyTorch takes most of the time."""
    assert "torch" not in run("import headrace.engine.core, headrace.processes.process\nprint(*sys.modules)").split()
