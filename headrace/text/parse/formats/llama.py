"""``{"name": ..., "parameters": {...}}``, after ``<|python_tag|>`` or alone; ``;`` between calls."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "llama3_json",
        aliases=("llama3", "llama4_json", "llama"),
        hints=(("<|python_tag|>",), ('{"name": function name',)),
        opens=(Mark("<|python_tag|>", "call"),),
        lead={"{": "call"},
        states={
            "call": State("scan", scan="calls", then="more"),
            "more": State("after", (Mark(";", "call"), Mark("<|python_tag|>", "call")), lead={"{": "call"}),
        },
        written=(Written('{"name": "NAME", "parameters": ARGUMENTS}', between="; ", optional="<|python_tag|>"),),
    ),
)
