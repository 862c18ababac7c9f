"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one for each call. Ernie's answers are in ``<response>``."""

from dataclasses import replace

from headrace.text.parse.format import marked

_HERMES = marked("hermes", "calls", ("<tool_call>",), "</tool_call>")
FORMATS = (
    replace(_HERMES, name="ernie45", hints=(("<tool_call>", "<response>"),), wrap=("<response>", "</response>")),
    replace(_HERMES, aliases=("qwen25", "qwen", "qwen3_json", "longcat")),
)
