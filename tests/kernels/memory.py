"""A memory checker for interpreted kernels: every read and write lies in a tensor that the launch was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBoundsError(AssertionError):
    """A kernel read or wrote what it was not given."""


class Checker:
    """Makes launches, while it is on, know the memory of their tensors, whole storages: views may lie anywhere in them."""

    def __init__(self) -> None:
        self.accesses = 0
        self._begins, self._ends = np.empty(0, np.uint64), np.empty(0, np.uint64)
        self._kernel = ""

    @contextmanager
    def on(self) -> Iterator[Checker]:
        run, load, store = GridExecutor.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        swap, add = InterpreterBuilder.create_atomic_cas, InterpreterBuilder.create_atomic_rmw

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._begins, self._ends, self._kernel
            listed = [each if isinstance(each, tuple) else (each,) for each in (*args, *kwargs.values())]
            given = [each.base if isinstance(each, TensorDescriptor) else each for group in listed for each in group]
            tensors = [each.untyped_storage() for each in given if isinstance(each, torch.Tensor)]
            self._begins = np.array([each.data_ptr() for each in tensors], dtype=np.uint64)
            self._ends = self._begins + np.array([each.nbytes() for each in tensors], dtype=np.uint64)
            self._kernel = executor.fn.__name__
            try:
                return run(executor, *args, **kwargs)
            finally:
                self._begins, self._ends, self._kernel = before

        def checked_load(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self._check("reads", pointers, mask)
            return load(builder, pointers, mask, *rest, **named)

        def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._check("writes", pointers, mask)
            return store(builder, pointers, value, mask, *rest)

        def checked_swap(builder: Any, pointers: Any, *rest: Any) -> Any:
            self._check("swaps", pointers, None)
            return swap(builder, pointers, *rest)

        def checked_add(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._check("adds to", pointers, mask)
            return add(builder, operation, pointers, value, mask, *rest)

        with (
            mock.patch.object(GridExecutor, "__call__", launch),
            mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load),
            mock.patch.object(InterpreterBuilder, "create_masked_store", checked_store),
            mock.patch.object(InterpreterBuilder, "create_atomic_cas", checked_swap),
            mock.patch.object(InterpreterBuilder, "create_atomic_rmw", checked_add),
        ):
            yield self

    def _check(self, does: str, pointers: Any, mask: Any) -> None:
        places = np.asarray(pointers.data)
        if mask is not None:
            places = places[np.broadcast_to(np.asarray(mask.data, dtype=bool), places.shape)]
        if not places.size:
            return
        self.accesses += 1
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        # All accesses of an operation are of one tensor: the two farthest apart stand for those between.
        low, high = places.min(), places.max() + size
        if not ((self._begins <= low) & (high <= self._ends)).any():
            raise OutOfBoundsError(f"{self._kernel} {does} {int(low):#x} to {int(high):#x}, which is in none of its tensors")
