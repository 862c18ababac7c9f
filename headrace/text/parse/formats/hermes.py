"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one for each call. Ernie's answers are in ``<response>``."""

import dataclasses

from headrace.text.parse.format import Format, Mark, State

_HERMES = Format(
    "hermes",
    aliases=("qwen25", "qwen", "qwen3_json", "longcat"),
    hints=(("<tool_call>",),),
    opens=(Mark("<tool_call>", "call"),),
    states={
        "call": State("scan", scan="calls", then="close"),
        "close": State("space", (Mark("</tool_call>", "after"),)),
    },
)
_ERNIE = {"name": "ernie45", "aliases": (), "hints": (("<tool_call>", "<response>"),), "wrap": ("<response>", "</response>")}
FORMATS = (dataclasses.replace(_HERMES, **_ERNIE), _HERMES)
