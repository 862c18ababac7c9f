"""What the engine asks of a runner."""

from __future__ import annotations

from typing import Protocol, TypeVar

from headrace.core.plan import StepPlan, StepResult

Handle = TypeVar("Handle")


class Runner(Protocol[Handle]):
    """Executes plans in order. ``launch`` must not wait for the device; ``collect`` may."""

    def launch(self, plan: StepPlan) -> Handle: ...

    def collect(self, handle: Handle) -> StepResult: ...

    def close(self) -> None: ...
