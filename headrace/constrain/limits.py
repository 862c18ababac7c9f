"""Limits of llguidance, from the configuration."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from headrace.config import StructuredOutputsConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_ITEMS = 20_000
"""Alternatives of a grammar that may be open at once: as many as a schema may have properties. llguidance allows 2,000."""
_STEP_FUEL = 100_000
"""Half of llguidance's: a mask of some 50 ms at most, for which every sequence of the step waits."""
_NICENESS = 15


def make_pool(config: StructuredOutputsConfig) -> ThreadPoolExecutor:
    """Threads that compile constraints, after all others of the process where cores are short."""
    threads = config.compile_threads or min(4, -(-(os.cpu_count() or 1) // 2))
    return ThreadPoolExecutor(threads, thread_name_prefix="grammar", initializer=_lower_priority)


def _lower_priority() -> None:
    """Of this thread: on Linux a priority is a thread's own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def parser_limits(config: StructuredOutputsConfig) -> LLParserLimits:
    """What one grammar may take to compile, and to advance by one token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=config.max_grammar_size,
        max_lexer_states=config.max_lexer_states,
        max_items_in_row=_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        verbose_errors=False,  # they would tell one client's grammar to the log
    )
