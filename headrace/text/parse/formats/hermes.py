"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one for each call."""

from headrace.text.parse.format import Format, Mark, State

FORMATS = (
    Format(
        "hermes",
        aliases=("qwen25", "qwen", "qwen3_json", "longcat"),
        hints=(("<tool_call>",),),
        opens=(Mark("<tool_call>", "call"),),
        states={
            "call": State("scan", scan="calls", then="close"),
            "close": State("space", (Mark("</tool_call>", "after"),)),
        },
    ),
)
