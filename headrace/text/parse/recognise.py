"""Recognises the formats of a model's answers by its chat template and vocabulary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, did_you_mean
from headrace.text.parse.format import Choice, Format, Machine, Reasoning, Vocabulary
from headrace.text.parse.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    hf,
    reasoning_format,
    reasoning_names,
    tool_format,
    tool_names,
)
from headrace.text.parse.formats.hermes import GENERIC

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


_WHOLE = frozenset(name for format in TOOL_FORMATS if format.whole for name in (format.name, *format.aliases))


@dataclasses.dataclass(frozen=True)
class Recognised:
    """The formats of a model's answers, with the reason for each."""

    choice: Choice
    tools_by: str
    reasoning_by: str


def recognise(
    template: str | Mapping[str, str] | None,
    vocabulary: Vocabulary,
    *,
    tools: str = "auto",
    reasoning: str = "auto",
    response_template: Mapping[str, Any] | None = None,
) -> Recognised:
    """``tools`` and ``reasoning``: a format's name, ``none``, or ``auto``.

    Raises:
        ConfigError: there is no format of this name; or it is ``hf``, and the checkpoint has none that can be read.
    """
    text = template if isinstance(template, str) else "\n".join((template or {}).values())
    own, why = _own(response_template, vocabulary)
    calls, tools_by = _tools(text, tools, own, why)
    thought, reasoning_by = _reasoning(text, vocabulary, reasoning, own)
    whole = calls if calls is not None and calls.whole else tool_format(reasoning) if reasoning in _WHOLE else None
    if whole is not None:
        tools_by = tools_by if whole is calls else reasoning_by
        calls, reasoning_by = whole, f"part of {whole.name}"
    return Recognised(Choice(calls, thought), tools_by, reasoning_by)


def _own(template: Mapping[str, Any] | None, vocabulary: Vocabulary) -> tuple[Choice, str]:
    """Returns the formats that the checkpoint declares, and their source or the reason for having none."""
    if template is None:
        return Choice(), "the checkpoint has no response_template"
    try:
        choice = hf.load(template)
        Machine(choice.states(calls=True, reasoning=True), vocabulary, "hf")
        return choice, "the checkpoint's response_template"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Choice(), f"the checkpoint's response_template cannot be used: {error}"


def _tools(text: str, name: str, own: Choice, why: str) -> tuple[Format | None, str]:
    if name == "auto":
        for format in TOOL_FORMATS:
            if fitting := next((hint for hint in format.hints if all(part in text for part in hint)), None):
                return format, f"{' and '.join(fitting)} in the chat template"
        if own.tools is not None:
            return own.tools, why
        return GENERIC if text else None, f"no known markers in the chat template, and {why}"
    check_format_names(name, "none")
    found = own.tools if name == "hf" else tool_format(name)
    if found is None and name == "hf":
        raise ConfigError(f"tool_call_parser: this model has no format hf ({why})", "tool_call_parser")
    return found, f"--tool-call-parser {name}"


def _reasoning(text: str, vocabulary: Vocabulary, name: str, own: Choice) -> tuple[Reasoning | None, str]:
    if name == "auto":
        for format in REASONING_FORMATS:
            if hint := next((hint for hint in format.hints or (format.open, format.close) if hint in text), None):
                return format, f"{hint} in the chat template"
            if {format.open, format.close} <= vocabulary.tokens.keys():
                return format, f"{format.open} in the vocabulary"
        return own.reasoning, "the checkpoint's response_template" if own.reasoning else "no markers are known"
    check_format_names("none", name)
    found = own.reasoning if name == "hf" else reasoning_format(name)
    if found is None and name == "hf":
        raise ConfigError("reasoning_parser: this model has no format hf", "reasoning_parser")
    return found, f"--reasoning-parser {name}"


def check_format_names(tools: str, reasoning: str) -> None:
    """Checks the values of ``tool_call_parser`` and ``reasoning_parser`` as far as they do not depend on the model.

    Raises:
        ConfigError: there is no format of the name.
    """
    known = {"tool_call_parser": (tools, tool_names()), "reasoning_parser": (reasoning, reasoning_names())}
    for param, (name, names) in known.items():
        words = [*names, "hf", "auto", "none"]
        if name not in words and not (param == "reasoning_parser" and name in _WHOLE):
            hint = did_you_mean(name, words)
            raise ConfigError(f"{param}: there is no format {name}{hint}; there is {', '.join(words)}", param)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Added tokens that look like markers: words and whitespace are text."""
    added = tokenizer.hf.backend_tokenizer.get_added_tokens_decoder()
    tokens = {entry.content: token for token, entry in added.items() if re.match(r"[<\[｜|].+|.+[>\]｜|]$", entry.content)}
    return Vocabulary(tokens, tokenizer.token_bytes.special)
