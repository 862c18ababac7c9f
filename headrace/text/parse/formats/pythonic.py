"""``[f(a=1, b="x"), g()]``, alone or between markers."""

from headrace.text.parse.format import Format, Mark, State


def _between(name: str, opening: str, closing: str, *hints: str) -> Format:
    return Format(
        name,
        hints=((opening,), *((hint,) for hint in hints)),
        opens=(Mark(opening, "call"),),
        states={
            "call": State("scan", scan="python", then="close"),
            "close": State("space", (Mark(closing, "after"),)),
        },
    )


FORMATS = (
    _between("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
    _between("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>"),
    _between("olmo3", "<function_calls>", "</function_calls>"),
    Format(
        "pythonic",
        hints=(("[func_name1(",),),
        lead={"[": "call"},
        states={"call": State("scan", scan="python", then="after")},
    ),
)
