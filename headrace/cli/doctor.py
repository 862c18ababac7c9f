"""``headrace doctor``: what would be served here, how, and why, without serving it."""

from __future__ import annotations

from headrace.cli.engine_options import ENGINE
from headrace.cli.options import command
from headrace.config import EngineArgs


@command(args=ENGINE)
def doctor(args: EngineArgs) -> None:
    """pending"""
