"""The reward, which processes that TRL spawns import."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Rewards short answers."""
    return [-float(len(str(completion))) for completion in completions]
