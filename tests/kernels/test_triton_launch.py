"""Launches by our own key: of all arguments, they take the compiled kernel and the values that Triton's launcher takes."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.kernels.triton_launch import Kernel, ask_compiler, compile_launches, launched


def add(x, y, out, free, count, stride, wide: tl.int64, far: tl.int64, scale, BLOCK: tl.constexpr, MODE: tl.constexpr = "up"):  # type: ignore[no-untyped-def]
    pass


OPTIONS = {"do_not_specialize": ["count", "far"], "do_not_specialize_on_alignment": ["free"]}


class Device:
    """Stands in for Triton's driver; there is a GPU of its number."""

    number = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def set_current_device(self, device: int) -> None:
        assert device == self.number

    def get_current_stream(self, device: int) -> int:
        return 7


@dataclasses.dataclass(eq=False)
class Compiled:
    """Stands in for a compiled kernel, and notes what it is launched with."""

    launches: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    function: int = 3
    packed_metadata: tuple[int, ...] = (4, 1, 0)

    def run(self, *launch: Any) -> None:
        self.launches.append(launch)

    def launch_metadata(self, *launch: Any) -> None:
        return None


class World:
    """A kernel that is compiled by no compiler: each specialisation is a ``Compiled`` of its own."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.function: Any = JITFunction(add, **OPTIONS)
        self.function._do_compile = self._compile
        self.kernel = Kernel(self.function)
        self.compiled: list[Compiled] = []
        self.through_triton = 0
        run = self.function.run

        def counted(*args: Any, **options: Any) -> Any:
            self.through_triton += 1
            return run(*args, **options)

        self.function.run = counted
        self._run = run

    def _compile(self, key: Any, signature: Any, device: int, *depends: Any) -> Compiled:
        made = Compiled()
        self.compiled.append(made)
        self.function.device_caches[device][0][key] = made
        return made

    def launch(self, args: tuple[Any, ...], **named: Any) -> tuple[Compiled, tuple[Any, ...]]:
        """What our launcher launches."""
        for each in self.compiled:
            each.launches.clear()
        self.kernel[(5, 6)](*args, **named)
        ((made, launch),) = ((each, launch) for each in self.compiled for launch in each.launches)
        return made, launch

    def wanted(self, args: tuple[Any, ...], **named: Any) -> tuple[Compiled, tuple[Any, ...]]:
        """What Triton's launcher launches."""
        made = self._run(*args, grid=(5, 6), warmup=False, **named)
        return made, made.launches[-1]


@pytest.fixture
def world() -> Iterator[World]:
    device = Device()
    with mock.patch.object(driver, "_active", device):
        yield World(device)


HELD = torch.zeros(4096, dtype=torch.float32)
NUMBERS = (0, 1, 2, 8, 16, 17, 2048, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**32, -(2**31), -(2**31) - 1)


def arguments(chance: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def tensor() -> torch.Tensor:
        return HELD.view(chance.choice((torch.float32, torch.int32, torch.bfloat16)))[chance.choice((0, 1, 2, 4, 8, 16)) :]

    numbers = [chance.choice(NUMBERS) for _ in range(4)]
    args = (*(tensor() for _ in range(4)), *numbers, chance.choice((0.5, 1.0, 1, 3)))
    named = {"BLOCK": chance.choice((16, 32)), "num_warps": chance.choice((2, 4))}
    if chance.random() < 0.5:
        named["MODE"] = chance.choice(("up", "down"))
    return args, dict(chance.sample(list(named.items()), len(named)))


def plain(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, function and metadata; and arguments as numbers. In between there are hooks."""
    return [*launch[:6], *(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in launch[9:])]


def test_what_is_launched_is_what_triton_launches(world: World) -> None:
    chance = random.Random(0)
    for _ in range(3000):
        args, named = arguments(chance)
        made, launch = world.launch(args, **named)
        wanted, by_triton = world.wanted(args, **named)
        assert made is wanted
        assert plain(launch) == plain(by_triton)
    assert len(world.compiled) > 100


def test_what_was_launched_before_takes_no_way_through_triton(world: World) -> None:
    args, named = arguments(random.Random(1))
    world.launch(args, **named)
    assert world.through_triton == 1
    for _ in range(3):
        world.launch(args, **named)
    # Numbers that a kernel is not specialised for, and another address as good as the first.
    varied = list(args)
    varied[4] = 1 if args[4] != 1 else 16
    varied[0] = args[0][16:]
    world.launch(tuple(varied), **named)
    assert world.through_triton == 1


def test_devices_have_kernels_of_their_own(world: World) -> None:
    args, named = arguments(random.Random(2))
    first, _ = world.launch(args, **named)
    world.device.number = 1
    second, _ = world.launch(args, **named)
    assert first is not second
    world.device.number = 0
    assert world.launch(args, **named)[0] is first


def test_what_has_no_key_goes_through_triton(world: World) -> None:
    args, named = arguments(random.Random(3))
    for _ in range(2):
        world.launch((*args[:3], (args[3],), *args[4:]), **named)
    assert world.through_triton == 2


def test_what_is_passed_by_name_and_is_no_constant_goes_through_triton(world: World) -> None:
    args, named = arguments(random.Random(4))
    for _ in range(2):
        world.launch(args[:-1], scale=args[-1], **named)
    assert world.through_triton == 2


def test_what_is_compiled_ahead_is_not_launched(world: World) -> None:
    args, named = arguments(random.Random(5))
    with compile_launches(2):
        for _ in range(2):
            world.kernel[(5, 6)](*args, **named)
        left = [
            torch.empty(4),
            torch.empty_like(HELD),
            HELD.new_empty(2, 2),
            torch.empty_strided((2, 3), (3, 1)),
            torch.ones(2),
        ]
    (compiled,) = world.compiled
    assert not compiled.launches
    # Whatever a kernel would have written may index something.
    assert [int(each.count_nonzero()) for each in left] == [0, 0, 0, 0, 2]
    made, launch = world.launch(args, **named)
    assert made is compiled and plain(launch) == plain(world.wanted(args, **named)[1])


AHEAD = """
import sys
import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from compile_kernels import activation, compile_only, linear, norm
from headrace.kernels.triton_launch import compile_launches
run = JITFunction.run
compile_only(90)
JITFunction.run = run
def note(src, cache_hit, **facts):
    # Threads call it: one write, since print makes several.
    sys.stdout.write(f"{src.fn.__name__} {'found' if cache_hit else 'compiled'}\\n")
knobs.compilation.listener = note
CompiledKernel._init_handles = lambda self: sys.stdout.write(f"{self.name} loaded\\n")
x = torch.zeros(4, 4096, dtype=torch.bfloat16)
with compile_launches(2):
    for _ in range(2):
        norm.rms_norm(x, x[0], 1e-6)
        activation.silu_mul(x)
        linear.linear(x, torch.zeros(4096, 4096, dtype=torch.bfloat16))
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_another_process_finds_what_was_compiled_ahead(tmp_path: Path) -> None:
    """Each once, and loaded, for a device that is not here, and without torch's compiler, whose import takes seconds."""

    def compiled() -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path)),
        }
        done = subprocess.run([sys.executable, "-c", AHEAD], env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return sorted(done.stdout.splitlines())

    names = ("_gated", "_rms_norm", "_several")
    assert compiled() == ["False", *(f"{name} {done}" for name in names for done in ("compiled", "loaded"))]
    assert compiled() == ["False", *(f"{name} {done}" for name in names for done in ("found", "loaded"))]


def test_launches_after_an_error_are_launches(world: World) -> None:
    args, named = arguments(random.Random(6))
    with pytest.raises(ValueError, match="no such step"), compile_launches(2):
        raise ValueError("no such step")
    assert world.launch(args, **named)[0].launches


def test_the_compiler_is_asked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread asks for the compiler's version, and the first launch uses that answer."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(nvidia, "get_ptxas_version", functools.cache(nvidia.get_ptxas_version))
    ask_compiler(3)
    make_backend(world.device.get_current_target()).hash()
    assert devices == [3] and nvidia.get_ptxas_version.cache_info().misses == 1


def test_the_interpreter_keeps_its_functions() -> None:
    assert not isinstance(launched(add), Kernel)
    assert not isinstance(launched(**OPTIONS)(add), Kernel)
