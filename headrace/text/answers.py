"""AnswerFormats: the formats of one model's answers, and how a request's answer is parsed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headrace.core.request import ParseOptions
from headrace.errors import RequestError
from headrace.text.effort import EffortVariables
from headrace.text.parse.arguments import type_of
from headrace.text.parse.engine import Parser
from headrace.text.parse.format import Format, Machine
from headrace.text.parse.formats.hermes import GENERIC
from headrace.text.parse.recognise import recognise, vocabulary_of

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

_SCHEMAS = 20_000
"""Schemas that are looked at for the types of a request's parameters, at least ``_LEAST_SCHEMAS`` for each of these."""
_LEAST_SCHEMAS = 4


class AnswerFormats:
    """The formats of one model's answers, for the client of the engine: makes the requests' parse options."""

    def __init__(self, tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> None:
        """Raises: ConfigError: see ``recognise``."""
        self._tokenizer = tokenizer
        template = tokenizer.hf.chat_template
        self.vocabulary = vocabulary_of(tokenizer)
        self.recognised = recognise(
            template, self.vocabulary, tools=tools, reasoning=reasoning, response_template=tokenizer.response_template
        )
        self._templates = list(template.values()) if isinstance(template, dict) else [template or ""]
        self.renders_tools = any(re.search(r"\btools\b", text) for text in self._templates)
        """Whether the chat template shows tools to the model."""

    @property
    def tools(self) -> Format | None:
        return self.recognised.choice.tools

    @property
    def spells_tools(self) -> bool:
        """Whether the prompt has tools, calls and results as text, since the chat template is not known to show them."""
        return self.tools is GENERIC

    @functools.cached_property
    def efforts(self) -> EffortVariables:
        """Returns the variables of the chat template that reasoning_effort sets."""
        choice = self.recognised.choice
        reasons = choice.reasoning is not None or (choice.tools is not None and choice.tools.whole)
        return EffortVariables.of(self._templates, reasons=reasons)

    @property
    def reasons(self) -> bool:
        """Whether the model reasons: in a known format, or as its chat template's variables tell."""
        return self.efforts != EffortVariables()

    def decisions(self) -> list[tuple[str, str, str]]:
        """Name, value and reason of each format."""
        found, choice = self.recognised, self.recognised.choice
        whole = choice.tools.name if choice.tools is not None and choice.tools.whole else "none"
        thought = choice.reasoning.name if choice.reasoning is not None else whole
        return [
            ("tool calls", choice.tools.name if choice.tools is not None else "none", found.tools_by),
            ("reasoning", thought, found.reasoning_by),
        ]

    @functools.cached_property
    def header(self) -> str:
        """Text that the chat template writes before an answer, up to markers; empty: unknown."""
        probe = [{"role": "user", "content": "headrace"}]
        try:
            rendered = self._tokenizer.render_chat(probe)
            header = rendered.removeprefix(self._tokenizer.render_chat(probe, add_generation_prompt=False))
        except RequestError:
            return ""
        if header == rendered or not header:
            header = rendered.rpartition("headrace")[2]
        states = self.recognised.choice.states(calls=True, reasoning=True).values()
        places = [place for state in states for mark in state.on if (place := header.find(mark.text)) > 0]
        return header[: min(places, default=len(header))]

    @functools.cached_property
    def machine(self) -> Machine:
        """State machine of everything that an answer may have."""
        return Machine(self.recognised.choice.states(calls=True, reasoning=True), self.vocabulary, "")

    def opening(self, prompt: str) -> Literal["start", "reasoning", "content"]:
        """Returns the part of an answer in which an answer to ``prompt`` begins: anywhere, in reasoning, or behind it.

        Raises:
            RequestError: in a call of a tool.
        """
        parser = Parser(self.machine, tail=self._tail(prompt))
        if parser.in_reasoning:
            return "reasoning"
        if parser.at_start:
            return "start"
        if parser.in_text:
            return "content"
        raise RequestError("messages: the last message ends within a tool call, whose rest cannot be held", "messages")

    def options(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        calls: bool = True,
        separate_reasoning: bool = True,
        **more: Any,
    ) -> ParseOptions | None:
        """Returns how to parse an answer to ``prompt``; None: it is text. ``more``: fields of ``ParseOptions``."""
        choice = self.recognised.choice
        calls = calls and choice.tools is not None
        separate_reasoning = separate_reasoning and (
            choice.reasoning is not None or (choice.tools is not None and choice.tools.whole)
        )
        if not calls and not separate_reasoning:
            return None
        return ParseOptions(
            choice.tools.name if choice.tools is not None else "none",
            choice.reasoning.name if choice.reasoning is not None else "none",
            calls,
            separate_reasoning,
            self._tail(prompt),
            _parameter_types(tools) if calls else {},
            **more,
        )

    def _tail(self, prompt: str) -> str:
        """The prompt's text in the answer's turn. Empty where the turn has no header: the last one is an older turn's."""
        tail = prompt.rpartition(self.header)[2] if self.header and self.header in prompt else ""
        ends = (self._tokenizer.token_text(token) for token in self._tokenizer.eos_token_ids)
        return "" if any(end in tail for end in ends if end) else tail


def _parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Name of each tool -> parameter -> its types."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    properties = {name: named for name, schema in schemas.items() if isinstance(named := schema.get("properties"), Mapping)}
    most = max(_LEAST_SCHEMAS, _SCHEMAS // max(1, sum(map(len, properties.values()))))
    return {
        name: {key: sorted(types_of(value, schema, most)) for key, value in properties.get(name, {}).items()}
        for name, schema in schemas.items()
    }


def types_of(schema: Any, root: Any = None, most: int = _SCHEMAS) -> frozenset[str]:
    """The JSON types that a schema allows; empty: unknown, also where more than ``most`` schemas or values tell them."""
    root = schema if root is None else root
    found: set[str] = set()
    pending, seen = [schema], set()
    for _ in range(most):
        if not pending:
            return frozenset(found)
        if not isinstance(schema := pending.pop(), Mapping):
            continue
        if (target := referred(schema, root)) is not None:
            if schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                pending.append(target)
            continue
        if isinstance(values := schema.get("enum"), list) and len(values) > most:
            return frozenset()
        found.update(_types(schema))
        for union in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := schema.get(union), list):
                pending += choices[:most]
    return frozenset() if pending else frozenset(found)


def referred(schema: Mapping[str, Any], root: Any) -> Any:
    """Returns the value to which the JSON Pointer in the ``$ref`` of a schema leads; None: there is none."""
    reference, target = schema.get("$ref"), root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the types that a schema names itself."""
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    elif isinstance(schema.get("enum"), list) or "const" in schema:
        for value in schema.get("enum") or [schema.get("const")]:
            yield type_of(value)
    if schema.get("nullable") is True:
        yield "null"
