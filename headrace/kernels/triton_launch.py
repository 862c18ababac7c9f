"""Launches of Triton kernels that take little of the host's time.

Triton's launcher binds a call's arguments by name, describes each of them, prints the options to look the compiled kernel up,
and asks the driver about each pointer. A step that runs kernel by kernel has hundreds of launches, and small models wait for
them. ``Kernel`` finds the compiled kernel by a key of its own and passes pointers as numbers.

The key tells apart whatever Triton specialises a kernel for, so that it is as fine as Triton's or finer: the device, constants
and options, the type of each argument, whether a pointer or a number is a multiple of 16, whether a number is 1, and how wide
it is. What has no key (tuples, tensor descriptors) and what is new goes through Triton. Hooks of Triton's launches are called
for those alone.

``compile_launches`` compiles kernels on several cores before they are launched, and loads them. Triton compiles one when it is
launched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, knobs
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelParam

from headrace.kernels.cuda_launch import compiling, compiling_on


class _Places(NamedTuple):
    """Places of the arguments of a launch, by what their types leave open."""

    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    """Integers that a kernel is specialised for."""
    any_numbers: tuple[int, ...]
    constants: tuple[int, ...]


class _Compiled(NamedTuple):
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    """Values of the parameters that are passed by name, or left out."""


class Kernel:
    """A Triton function that is launched as Triton's own are: ``kernel[grid](*arguments, **constants_and_options)``.

    Args:
        function: its parameters that are no constants come first, and are passed by position.
    """

    def __init__(self, function: JITFunction[Any]) -> None:
        self._function = function
        self._places: dict[tuple[type, ...], _Places | None] = {}
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if compiling.get() is not None:
            self._function.run(*args, grid=grid, warmup=True, **named)
            return
        types = tuple(map(type, args))
        if types not in self._places:
            self._places[types] = _places(types, self._function.params)
        places = self._places[types]
        if places is None:
            self._function.run(*args, grid=grid, warmup=False, **named)
            return
        active = driver.active
        device = active.get_current_device()
        values = list(args)
        key = [device, types, *named, *named.values()]
        for place in places.tensors:
            tensor = args[place]
            values[place] = pointer = tensor.data_ptr()
            key.append(tensor.dtype)
            key.append(not pointer & 15)
        for place in places.numbers:
            number = args[place]
            key.append((number ^ number >> 64).bit_length() >> 5)
            key.append(1 if number == 1 else -(not number & 15))
        for place in places.any_numbers:
            number = args[place]
            # How wide it is: numbers from 2 ** 31 and 2 ** 63 on are wider, and those below -2 ** 31.
            key.append((number ^ number >> 64).bit_length() >> 5)
        for place in places.constants:
            key.append(args[place])
        compiled = self._compiled.get(tuple(key))
        if compiled is None:
            self._compile(tuple(key), grid, args, named)
            return
        run, function, metadata, constants = compiled
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values, *constants)

    def _compile(self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Launches through Triton, which compiles what is not compiled, and keeps what it launched."""
        kernel = self._function.run(*args, grid=grid, warmup=False, **named)
        rest = self._function.params[len(args) :]
        if kernel is not None and all(parameter.is_constexpr for parameter in rest):
            constants = tuple(named.get(parameter.name, parameter.default) for parameter in rest)
            self._compiled[key] = _Compiled(kernel.run, kernel.function, kernel.packed_metadata, constants)


def _places(types: tuple[type, ...], parameters: Sequence[KernelParam]) -> _Places | None:
    """The places of arguments of these types; None: one of them is of a type without a key."""
    tensors: list[int] = []
    numbers: list[int] = []
    any_numbers: list[int] = []
    constants: list[int] = []
    for place, (kind, parameter) in enumerate(zip(types, parameters, strict=False)):
        if parameter.is_constexpr:
            constants.append(place)
        elif issubclass(kind, torch.Tensor):
            tensors.append(place)
        elif kind is int:
            (any_numbers if parameter.do_not_specialize else numbers).append(place)
        elif kind is not float:
            return None
    return _Places(tuple(tensors), tuple(numbers), tuple(any_numbers), tuple(constants))


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorates a kernel as ``triton.jit`` does, with its options. Functions that kernels call keep ``triton.jit``."""
    if function is None:
        return functools.partial(launched, **options)
    made = triton.jit(function, **options)
    # The interpreter has functions of another class.
    return Kernel(made) if isinstance(made, JITFunction) else made


class _Zeros(TorchFunctionMode):
    """Gives tensors that are made without values zeros, which are in range whatever they index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.__name__.removeprefix("new_").startswith("empty") else made


class _Loading(Executor):
    """Has the threads of a pool load the kernels that they compile, for which Triton may run a C compiler."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def loaded() -> Any:
            kernel = compile_kernel(*args, **named)
            kernel.run  # noqa: B018 (whoever asks for it first loads the kernel)
            return kernel

        return self._pool.submit(loaded)


@contextlib.contextmanager
def compile_launches(threads: int) -> Iterator[None]:
    """Compiles and loads the kernels that this thread launches within, several at a time, and launches none of them. When it
    ends they are ready.

    What a kernel would have written is zeros, or what was there before: results are of no use, and must decide nothing.
    """
    active = driver.active
    pool = ThreadPoolExecutor(threads, "triton", active.set_current_device, (active.get_current_device(),))
    with pool, AsyncCompileMode(_Loading(pool)), compiling_on(pool), _Zeros():
        yield


def ask_compiler(device: int) -> None:
    """Asks what Triton asks once a process, and which takes most of a second: for its driver, and its compiler's version."""
    torch.cuda.set_device(device)
    make_backend(driver.active.get_current_target()).hash()


def compiled_kernels() -> Path:
    """The folder in which Triton keeps what it has compiled."""
    return Path(knobs.cache.dir)
