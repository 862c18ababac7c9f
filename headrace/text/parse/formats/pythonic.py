"""``[f(a=1, b="x"), g()]``, alone or between markers."""

from dataclasses import replace

from headrace.text.parse.format import Format, Literals, State, Written, marked

_LINES = Written(
    "NAME(PARAMETERS)",
    between="\n",
    parameter="KEY=VALUE",
    joint=", ",
    keys=r"[^\W\d]\w*",
    names=r"[^\W\d][\w.\-]*",
    literals=Literals('"KEY": VALUE', ", ", words={"true": "True", "false": "False", "null": "None"}),
)
_LISTED = replace(_LINES, begin="[", between=", ", end="]")
FORMATS = (
    marked("llama4_pythonic", "python", ("<|python_start|>",), "<|python_end|>", written=(_LISTED,)),
    marked(
        "lfm2",
        "python",
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_list_start|>"),
        (_LISTED,),
    ),
    marked("olmo3", "python", ("<function_calls>",), "</function_calls>", written=(_LINES,)),
    Format(
        "pythonic",
        hints=(("[func_name1(",),),
        lead={"[": "call"},
        states={"call": State("scan", scan="python", then="after")},
        written=(_LISTED,),
    ),
)
