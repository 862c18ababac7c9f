"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one for each call. Ernie's answers are in ``<response>``."""

from dataclasses import replace

from headrace.text.parse.format import Written, marked

_WRITTEN = Written('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n")
_HERMES = replace(marked("hermes", "calls", ("<tool_call>",), "</tool_call>"), written=(_WRITTEN,))
GENERIC = replace(_HERMES, name="generic", hints=())
"""Format for models of no known format: the prompt itself says how to call, in the words of ``spelled_tools``."""
FORMATS = (
    replace(_HERMES, name="ernie45", hints=(("<tool_call>", "<response>"),), wrap=("<response>", "</response>")),
    replace(_HERMES, aliases=("qwen25", "qwen", "qwen3_json", "longcat")),
    GENERIC,
)
