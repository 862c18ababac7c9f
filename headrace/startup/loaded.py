"""Result of loading a model, in this process or in those of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.config import EngineConfig, MemoryLine
from headrace.engine.executor import Executor
from headrace.resolve import DeviceFacts
from headrace.startup.profile import Profile


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A ready executor with its configuration and measurements."""

    executor: Executor[Any]
    config: EngineConfig
    device: DeviceFacts
    weights: list[MemoryLine]
    profile: Profile | None
    """None on a CPU."""
