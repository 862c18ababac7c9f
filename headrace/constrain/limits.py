"""Limits of llguidance, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config import StructuredOutputsConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits


def parser_limits(config: StructuredOutputsConfig) -> LLParserLimits:
    """What one grammar may take to compile, and to advance by one token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=config.max_grammar_size,
        max_lexer_states=config.max_lexer_states,
        verbose_errors=False,  # they would tell one client's grammar to the log
    )
