"""Limits of llguidance, from the configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.constrain.pool import CompilePools
from headrace.option_groups import StructuredOutputsConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_ITEMS = 20_000
"""Alternatives of a grammar that may be open at once, and those that one mask may go through, some 20,000 a millisecond: as
many as a schema may have properties. llguidance allows 2,000 and 50,000."""
CHECK_STACK = 2**22
"""Bytes of stack of the process that checks constraints. Threads that compile what it has compiled have four times as much."""
QUICK_SECONDS = 0.25
"""Processor time within which most constraints are checked, or compiled. Those that take longer wait for each other."""
_STEP_FUEL = 100_000
"""Half of llguidance's: a mask of some 50 ms at most, for which every sequence of the step waits."""


def make_pools(config: StructuredOutputsConfig) -> CompilePools:
    """Threads that compile constraints."""
    return CompilePools(lanes(config), 4 * CHECK_STACK)


def lanes(config: StructuredOutputsConfig) -> int:
    """Returns how many constraints are checked, or compiled, at once, beside one that is slow."""
    return config.compile_threads or min(4, -(-(os.cpu_count() or 1) // 2))


def parser_limits(config: StructuredOutputsConfig) -> LLParserLimits:
    """Returns the limits on compiling one grammar, and on advancing it by one token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=config.max_grammar_size,
        max_lexer_states=config.max_lexer_states,
        max_items_in_row=_ITEMS,
        step_max_items=_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        verbose_errors=False,  # they would tell one client's grammar to the log
    )
