"""``<|tool_call>call:F{k:<|"|>v<|"|>}<tool_call|>``."""

from headrace.text.parse.format import Format, Literals, Mark, State, Written

_KEYS = r"[^\s{}\[\],:\"<>]+"
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
        written=(
            Written(
                "<|tool_call>call:NAME{PARAMETERS}<tool_call|>",
                parameter="KEY:VALUE",
                joint=",",
                keys=_KEYS,
                literals=Literals("KEY:VALUE", ",", quote='<|"|>', keys=_KEYS),
            ),
        ),
    ),
)
