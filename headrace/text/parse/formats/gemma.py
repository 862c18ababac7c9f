"""``<|tool_call>call:F{k:<|"|>v<|"|>}<tool_call|>``."""

from headrace.text.parse.format import Format, Mark, State

FORMATS = (
    Format(
        "gemma4",
        hints=(("<|tool_call>", "call:"),),
        opens=(Mark("<|tool_call>", "call"),),
        states={
            "call": State("space", (Mark("call:", "name"),)),
            "name": State("name", (Mark("{", "arguments", keep=True),)),
            "arguments": State("scan", (Mark('<|"|>', ""),), scan="quoted", then="close"),
            "close": State("space", (Mark("<tool_call|>", "after"),)),
        },
    ),
)
