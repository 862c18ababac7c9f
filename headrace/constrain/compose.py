"""compose: one grammar of a whole answer: its reasoning, then the answer itself or calls of tools.

There is no gate between the parts: the grammar holds from the first token on, and where reasoning ends is part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from headrace.constrain.lark import Hold, spelled
from headrace.constrain.parameters import CUSTOM_INPUT, HeldTool, Parameters
from headrace.errors import RequestError, unsupported
from headrace.text.answers import AnswerFormats
from headrace.text.parse.format import Choice, Format, Reasoning, Vocabulary, Written

Opening = Literal["start", "reasoning", "content"]
"""Beginning of an answer: anywhere, in reasoning that the prompt has opened, or behind it."""


class CallRules(msgspec.Struct, frozen=True):
    """Rules of the calls in an answer."""

    tools: tuple[HeldTool, ...]
    required: bool = False
    """The answer has at least one call. Otherwise it has text, or text and then calls."""
    parallel: bool = True
    """False: one call at most."""
    param: str = "tools"
    """Parameter that asks for the grammar."""


class TextGrammar(msgspec.Struct, frozen=True):
    """Grammar of the text of a tool's calls."""

    syntax: Literal["lark", "regex"]
    definition: str


def held_tools(
    tools: Sequence[Mapping[str, Any]],
    where: str = "tools",
    *,
    always: bool = False,
    grammars: Mapping[str, TextGrammar] = MappingProxyType({}),
) -> tuple[HeldTool, ...]:
    """Checked tools as grammars hold them.

    Args:
        always: their arguments are held also without ``strict``.
        grammars: of the tools whose calls have a text, by name.
    """
    held = []
    for index, tool in enumerate(tools):
        function, inner = tool["function"], f"{where}[{index}]" if where == "functions" else f"{where}[{index}].function"
        if (grammar := grammars.get(function["name"])) is not None:
            held.append(_held_text(function["name"], grammar, f"{where}[{index}].format.definition"))
            continue
        strict, parameters = bool(function.get("strict")), None
        if strict or always:
            # A function without parameters has none.
            parameters = json.dumps(function.get("parameters") or {"type": "object", "additionalProperties": False})
        held.append(HeldTool(function["name"], parameters, f"{inner}.parameters", strict))
    return tuple(held)


def _held_text(name: str, grammar: TextGrammar, param: str) -> HeldTool:
    if grammar.syntax == "lark":
        return HeldTool(name, None, param, True, grammar.definition)
    text = {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
    schema = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT], "additionalProperties": False}
    return HeldTool(name, json.dumps(schema), param, True)


def strict_at(tools: Sequence[HeldTool]) -> str | None:
    """Returns the parameter in which a request first says that a tool is strict."""
    found = next((tool.param for tool in tools if tool.strict), None)
    return found if found is None or found.endswith("definition") else found.removesuffix("parameters") + "strict"


@dataclasses.dataclass(frozen=True)
class AnswerPlan:
    """Format of an answer: the parts around and beside its content."""

    choice: Choice
    vocabulary: Vocabulary
    opening: Opening
    rules: CallRules | None = None
    budget: int | None = None
    """Tokens of reasoning at most, beside its markers."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal plans of one engine."""
        tools, reasoning = self.choice.tools, self.choice.reasoning
        return tools and tools.name, reasoning and reasoning.name, self.opening, self.rules, self.budget

    @property
    def plain(self) -> bool:
        """Whether the answer is content alone."""
        return self.rules is None and (self.opening == "content" or thought_of(self.choice) is None)


def plan_of(
    answers: AnswerFormats,
    prompt: str,
    rules: CallRules | None = None,
    *,
    budget: int | None = None,
    in_reasoning: bool = False,
) -> AnswerPlan:
    """The plan of an answer to ``prompt``.

    Args:
        budget: tokens of reasoning at most; a model that does not reason keeps any.
        in_reasoning: what is held is held from the first token on.

    Raises:
        RequestError: the format of the model's tool calls or reasoning is none that can be held.
    """
    choice = answers.recognised.choice
    if not answers.reasons:
        budget = None
    if budget is not None:
        _check_budget(choice, answers.vocabulary)
    if rules is not None and (choice.tools is None or not choice.tools.written):
        name = choice.tools.name if choice.tools is not None else "none"
        why = f"with this model's format of tool calls, {name}: its calls cannot be constrained"
        raise unsupported(rules.param, f"{rules.param} is not supported {why}")
    return AnswerPlan(choice, answers.vocabulary, "content" if in_reasoning else answers.opening(prompt), rules, budget)


def _check_budget(choice: Choice, vocabulary: Vocabulary) -> None:
    thought, name = thought_of(choice), "thinking_token_budget"
    if thought is None:
        why = "this model's format of reasoning is not known: name it with --reasoning-parser"
    elif choice.tools is not None and choice.tools.whole:
        why = f"it cannot be held in this model's format, {choice.tools.name}"
    elif any(isinstance(spelled(mark, vocabulary.tokens)[0], str) for mark in (thought.open, thought.close)):
        why = "the markers of this model's reasoning are not tokens of its vocabulary"
    else:
        return
    raise unsupported(name, f"{name} is not supported: {why}")


def thought_of(choice: Choice) -> Reasoning | None:
    """Returns the markers of reasoning."""
    return choice.tools.thought if choice.tools is not None and choice.tools.whole else choice.reasoning


def compose(plan: AnswerPlan, answer: str | None, hold: Hold) -> str:
    """The grammar of an answer, in llguidance's serialised form.

    Args:
        answer: grammar of the content; None: it is text.

    Raises:
        RequestError: a tool's schema cannot be held.
    """
    return _Composer(plan, hold).grammar(answer)


_INDEX = "/[0-9]{1,3}/"


class _Composer(Parameters):
    def __init__(self, plan: AnswerPlan, hold: Hold) -> None:
        super().__init__(plan.vocabulary.tokens, plan.choice.tools, hold)
        self._plan = plan

    def grammar(self, answer: str | None) -> str:
        held = None if answer is None else self.sub(answer)
        rules, tools = self._plan.rules, self._plan.choice.tools
        if rules is not None and tools is not None:
            body = self._body(held, tools, rules)
        else:
            body = self._content(held or self._rest())
        return self.serialised(f"{self._reasoning()} ({body})")

    # Parts of an answer

    def _reasoning(self) -> str:
        plan, thought = self._plan, thought_of(self._plan.choice)
        if thought is None or plan.opening == "content":
            return ""
        rest = self.until(thought.close) if plan.budget is None else self._within(plan.budget, thought.close)
        if plan.choice.tools is None or not plan.choice.tools.whole:
            self.rules.append("GAP: /\\n{1,2}/")
            rest += " GAP?"
        opened = f"{self.literal(thought.open)} {rest}"
        if plan.choice.tools is not None and plan.choice.tools.whole:
            return f"{rest} ({opened})*" if plan.opening == "reasoning" else f"({opened})*"
        return rest if plan.opening == "reasoning" else f"({opened})?"

    def _within(self, budget: int, marker: str) -> str:
        """Returns the rule of a text of at most ``budget`` tokens, and a marker."""
        if not budget:
            return self.literal(marker)
        name = f"thought{len(self.rules)}"
        self.rules.append(f"{name}[max_tokens={budget}]: /(?s:.*)/")
        return f"{name} {self.literal(marker)}"

    def _rest(self) -> str:
        """An answer of which nothing is held but that reasoning does not begin again."""
        thought = thought_of(self._plan.choice)
        if self._plan.budget is None or thought is None:
            return self.text(())
        (opening, *_) = spelled(thought.open, self.tokens)
        return f"<[^{opening}]>*"

    def _content(self, expression: str) -> str:
        """Content, with what the format writes before it."""
        tools = self._plan.choice.tools
        before = tools.answer if tools is not None and self._plan.opening != "content" else ""
        return f"{self.literal(before)} {expression}" if before else expression

    def _body(self, held: str | None, tools: Format, rules: CallRules) -> str:
        calls = self._calls(tools.written, rules)
        if rules.required:
            return calls
        if held is not None:
            return f"{self._content(held)} | {calls}"
        marks = [mark.text for mark in tools.opens]
        spelled_out = [mark for mark in marks if not self.is_token(mark)]
        if tools.whole:
            return f"{self._content(self.text(()))} | {calls}"
        text = self.text(spelled_out, list(tools.lead))
        if tools.lead:
            return f"{text} | {calls}"
        forms: dict[str, list[Written]] = {}
        for written in tools.written:
            forms.setdefault(next(mark for mark in marks if written.first.startswith(mark)), []).append(written)
        each = []
        for opening, group in forms.items():
            if opening in spelled_out:
                each.append(f"{self.lazy(opening, spelled_out)} ({self._calls(group, rules, without=opening)})")
            else:
                each.append(f"{text} ({self._calls(group, rules)})")
        return " | ".join([text, *each])

    # Calls

    def _calls(self, forms: Sequence[Written], rules: CallRules, without: str = "") -> str:
        """``without``: a marker that they begin with, and that is read already."""
        return " | ".join(self._written(written, rules, without) for written in forms)

    def _written(self, written: Written, rules: CallRules, without: str) -> str:
        begin = written.begin.removeprefix(without) if written.begin else ""
        first = written.call if written.begin else written.call.removeprefix(without)
        calls = self._alternatives(written, first, rules)
        if rules.parallel and written.several:
            more = calls if first == written.call else self._alternatives(written, written.call, rules)
            calls = f"{calls} ({self.literal(written.between)} {more})*"
        optional = f"{self.literal(written.optional)}?" if written.optional else ""
        return f"{optional} {self.literal(begin)} {calls} {self.literal(written.end)}"

    def _alternatives(self, written: Written, call: str, rules: CallRules) -> str:
        name = f"call{len(self.rules)}"
        each = []
        for tool in rules.tools:
            if not re.fullmatch(written.names, tool.name):
                name = self._plan.choice.tools.name if self._plan.choice.tools is not None else ""
                message = f"the name {tool.name} cannot be held in this model's format of tool calls, {name}"
                raise RequestError(f"{tool.param}: {message}", tool.param, code="unsupported_schema")
            each.append(self._filled(call, {"NAME": tool.name}, functools.partial(self._part, written, tool)))
        self.rules.append(f"{name}: " + "\n | ".join(each))
        return name

    def _part(self, written: Written, tool: HeldTool, part: str) -> str:
        if part == "INDEX":
            return _INDEX
        if part == "ARGUMENTS":
            if tool.lark is not None:
                return self._text_object(tool)
            return self.sub(self._schema(self._arguments(tool), tool))
        return self._parameters(written, tool)
