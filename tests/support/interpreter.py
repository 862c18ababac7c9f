"""Triton's interpreter, which runs kernels on the CPU, as all tests use it.

It promises:

- A kernel computes what its source says, program after program, by numpy.
- Bits of ``tl.dot`` depend on the operands' values and the length of its sums alone, not on the numbers of rows and columns,
  the CPU or the number of threads, so that tests can compare them.
- A launch takes a part of the time that Triton's own takes, and what it computes differs in the order of those sums alone.

It does not promise:

- that a kernel compiles: ``kernels/test_triton_compiles.py`` compiles for GPUs that need not be there;
- a device's rounding: it cuts bfloat16 off, and sums in another order;
- to find races: programs do not run at the same time, and atomic operations always come in one order;
- to notice reads and writes out of bounds: ``kernels/memory.py`` adds that.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

ABREAST = 8
"""Sums that a product keeps side by side for each result: the quickest for blocks of kernels."""

blas_dot = InterpreterBuilder.create_dot
"""Triton's own ``tl.dot``, which calls ``numpy.matmul``."""


def install() -> None:
    """Prepares the interpreter for this process. ``TRITON_INTERPRET`` must be set before Triton is imported."""
    remember_builtins()
    patch_once_a_launch()
    remember_types()
    remember_blocks()
    leave_out_unread_checks()
    use_invariant_dot()


def remember_builtins() -> None:
    """Look up the names of Triton's builtins once.

    A launch replaces Triton's builtins by functions of numpy, and restores them at its end. To find them it sorts all members
    of Triton's modules, which takes a third of the time that kernels of small tensors take. Which names are builtins' does not
    change while no kernel runs; whether one is in its place at the moment is still asked each time.
    """
    names = {
        package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    }
    unknown = interpreter._patch_builtin

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            unknown(package, builder, scope)
            return
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def patch_once_a_launch() -> None:
    """Replace Triton's builtins at a launch's first call of device functions in its place, not at every call.

    A function sees the builtins as members of ``tl``, of ``tl.core`` or of both, and needs them replaced in those.
    """
    langs: dict[Any, frozenset[Any]] = {}
    patched: set[frozenset[Any]] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_new(fn: Any) -> Any:
        if (seen := langs.get(fn)) is None:
            modules = (value for value in fn.__globals__.values() if inspect.ismodule(value))
            seen = langs[fn] = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        if seen in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.add(seen)
        return scope

    def launch_unpatched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_new
    interpreter.GridExecutor.__call__ = launch_unpatched


def remember_types() -> None:
    """Make the table of numpy's types once, not at every operation."""
    convert = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def dtype_of(dtype: Any) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return convert(scalar)
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = convert(scalar)
        return found

    interpreter._get_np_dtype = dtype_of


def remember_blocks() -> None:
    """Make the type of a block, and the constants that a tensor has of its shape, once for each shape and type of element.

    Every operation makes such a type for each of its operands and for its result, which takes longer than small blocks take.
    """
    core = tl.core
    make, known = core.block_type.__init__, {}
    no_shape, one = core.tuple([]), core.constexpr(1)

    def make_block(block: Any, element_ty: Any, shape: Any) -> None:
        if not isinstance(shape, list | core.tuple):
            make(block, element_ty, shape)
            return
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        key = element_ty.name, getattr(element_ty, "address_space", 0), sizes
        if (found := known.get(key)) is None:
            make(block, element_ty, shape)
            block.constants = core.tuple([core.constexpr(size) for size in block.shape]), core.constexpr(block.numel)
            found = known[key] = vars(block).copy()
        vars(block).update(found)

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = type.constants if type.is_block() else (no_shape, one)

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor


def leave_out_unread_checks() -> None:
    """Leave out the sums in 64 bits that say whether one of 32 bits overflows: the interpreter computes them and, without its
    ``debug``, looks at none."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def use_invariant_dot() -> None:
    """Compute ``tl.dot`` by :func:`product` in place of BLAS, whose rows depend on how many there are.

    BLAS chooses its blocking by the CPU and by the size of the product, so that ``(a @ b)[i:j]`` and ``a[i:j] @ b`` may differ
    in bits.
    """

    def dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        return TensorHandle(product(_widened(a, dtype), _widened(b, dtype)) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = dot


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a`` [..., M, K] times ``b`` [..., K, N], in their type.

    Elementwise operations alone add up each result's K terms, in an order that K decides: bits do not depend on M, N, the CPU
    or the number of threads.
    """
    left = np.ascontiguousarray(a.swapaxes(-1, -2))[..., :, :, None]  # [..., K, M, 1]
    right = b[..., :, None, :]  # [..., K, 1, N]
    count = right.shape[-3]
    sums = left[..., :ABREAST, :, :] * right[..., :ABREAST, :, :]  # [..., ABREAST, M, N]
    for k in range(ABREAST, count, ABREAST):
        terms = left[..., k : k + ABREAST, :, :] * right[..., k : k + ABREAST, :, :]
        sums[..., : terms.shape[-3], :, :] += terms
    total = sums[..., 0, :, :]
    for k in range(1, sums.shape[-3]):
        total = total + sums[..., k, :, :]
    return total


def _widened(operand: Any, dtype: np.dtype) -> np.ndarray:
    """An operand's values in the type of the sums; numpy holds bfloat16 and float8 as integers."""
    data = operand.data
    if operand.dtype.is_bf16():
        return (data.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    if operand.dtype.is_fp8():
        data = interpreter._convert_float(data, operand.dtype, tl.float16, None).view(np.float16).reshape(data.shape)
    return data.astype(dtype, copy=False)
