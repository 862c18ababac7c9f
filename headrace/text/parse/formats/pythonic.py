"""``[f(a=1, b="x"), g()]``, alone or between markers."""

from headrace.text.parse.format import Format, State, marked

FORMATS = (
    marked("llama4_pythonic", "python", ("<|python_start|>",), "<|python_end|>"),
    marked("lfm2", "python", ("<|tool_call_start|>",), "<|tool_call_end|>", ("<|tool_call_start|>", "<|tool_list_start|>")),
    marked("olmo3", "python", ("<function_calls>",), "</function_calls>"),
    Format(
        "pythonic",
        hints=(("[func_name1(",),),
        lead={"[": "call"},
        states={"call": State("scan", scan="python", then="after")},
    ),
)
