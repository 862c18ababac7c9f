"""Intercepts the functions with a state (``recurrence.py``) in a model of transformers.

A module's ``forward`` is rebuilt with a copy of its globals in which these functions are ours, for that instance alone. They
ask the module for a handler: a recorder while the model is traced, and then the ``StateCalls`` of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from headrace.model_spec import StateSpec
from headrace.models.fallback.contract import ContextCell
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.recurrence import FUNCTIONS, Convolution, Recurrence

STATES = "_headrace_states"
"""Attribute of the modules that carry a state: what computes their calls."""


class _Handler(Protocol):
    def compute(self, module: nn.Module, call: Recurrence) -> torch.Tensor: ...


def patch_states(model: nn.Module) -> None:
    """Intercepts the functions in every module whose ``forward`` calls them."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, types.FunctionType):
            continue
        scope = forward.__globals__
        names = [name for name in forward.__code__.co_names if name in FUNCTIONS and name in scope]
        if not names:
            continue
        ours = {name: functools.partial(_intercepted, module, FUNCTIONS[name], scope[name]) for name in names}
        patched = types.FunctionType(
            forward.__code__, scope | ours, forward.__name__, forward.__defaults__, forward.__closure__
        )
        patched.__kwdefaults__ = forward.__kwdefaults__
        module.forward = types.MethodType(patched, module)


def carries_state(module: nn.Module) -> bool:
    """Whether its functions with a state are intercepted."""
    forward = module.__dict__.get("forward")
    return forward is not None and any(name in FUNCTIONS for name in forward.__func__.__code__.co_names)


def _intercepted(
    module: nn.Module, kind: Callable[..., Recurrence], theirs: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    handler: _Handler | None = module.__dict__.get(STATES)
    if handler is None:
        raise ValueError(f"a {type(module).__name__} was called outside of the model that headrace has loaded")
    call = kind(*args, **kwargs)
    call.theirs = functools.partial(theirs, *args, **kwargs)
    return call.returned(handler.compute(module, call))


@dataclasses.dataclass(frozen=True)
class TracedState:
    """One call of a function with a state."""

    path: str
    """Path of the calling module."""
    layer: int
    """Its state layer, whose convolution's call comes before that of its recurrence."""


class StateRecorder:
    """Records the calls of one pass."""

    def __init__(self, paths: Mapping[nn.Module, str], tokens: int, note: Callable[[], None]) -> None:
        """``note`` is called with each call."""
        self._paths, self._tokens, self._note = paths, tokens, note
        self.calls: list[TracedState] = []
        self.specs: list[StateSpec] = []

    def compute(self, module: nn.Module, call: Recurrence) -> torch.Tensor:
        path = self._paths[module]
        self._note()
        if call.tokens != self._tokens:
            raise Unfit(f"its state takes {call.tokens} tokens where {self._tokens} were given", path)
        spec = call.spec(len(self.specs))
        conv = self.specs[-1].conv if self.calls and self.calls[-1].path == path and self.specs[-1].kind == "conv" else None
        if spec.conv is None and conv is not None and conv.channels == spec.mixed_channels:
            spec = dataclasses.replace(spec, index=self.specs.pop().index, conv=conv)
        self.specs.append(spec)
        self.calls.append(TracedState(path, spec.index))
        return call.alone()


Look = Callable[[int, Recurrence], None]
"""Called with a state layer and a call of it."""


class StateCalls:
    """Maps the calls of one model, in order, to state layers.

    Args:
        modules: the module of each call.
        calls: as they were traced.
    """

    def __init__(self, modules: Sequence[nn.Module], calls: Sequence[TracedState], cell: ContextCell) -> None:
        self._modules, self._calls, self._cell = list(modules), list(calls), cell
        self._next = 0
        self._look: Look | None = None
        for module in self._modules:
            module.__dict__[STATES] = self

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """One forward pass. Raises ValueError if not every call was made."""
        self._next = 0
        yield
        if self._next != len(self._calls):
            raise ValueError(f"{self._next} of {len(self._calls)} functions with a state were called in this step")

    @contextmanager
    def alone(self, look: Look) -> Iterator[None]:
        """Keeps tokens apart inside the block, and gives ``look`` every call."""
        before, self._look = self._look, look
        try:
            yield
        finally:
            self._look = before

    def compute(self, module: nn.Module, call: Recurrence) -> torch.Tensor:
        index = self._next
        if index >= len(self._calls) or self._modules[index] is not module:
            raise ValueError(f"call {index} of a function with a state comes from a {type(module).__name__} out of turn")
        self._next += 1
        layer = self._calls[index].layer
        if self._look is not None:
            self._look(layer, call)
            return call.alone()
        rows, own = self._cell.context(f"state layer {layer}").state_of(layer)
        state = own.conv if isinstance(call, Convolution) else own.state
        if state is None:
            raise ValueError(f"state layer {layer} keeps nothing of what a {type(module).__name__} needs")
        return call.run(state, rows)
