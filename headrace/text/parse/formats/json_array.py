"""A marker, then a JSON array of calls, or one call."""

from dataclasses import replace

from headrace.text.parse.format import marked

FORMATS = (
    # Granite's opening; the closing distinguishes it.
    marked("phi4_mini_json", "calls", ("functools", "<|tool_call|>"), "<|/tool_call|>", ("functools", "<|/tool_call|>")),
    marked("nemotron_json", "calls", ("<TOOLCALL>",), "</TOOLCALL>"),
    marked("granite", "calls", ("<|tool_call|>",)),
    marked("jamba", "calls", ("<tool_calls>",), "</tool_calls>"),
    marked("internlm", "calls", ("<|action_start|><|plugin|>",), "<|action_end|>"),
    replace(marked("xlam", "calls", ("<tool_calls>", "[TOOL_CALLS]")), hints=(), lead={"[": "call"}),
)
