"""``<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "kimi_k2",
        hints=(("<|tool_calls_section_begin|>",),),
        opens=(Mark("<|tool_calls_section_begin|>", "section"),),
        states={
            "section": State("space", (Mark("<|tool_call_begin|>", "name"), Mark("<|tool_calls_section_end|>", "after"))),
            "name": State(
                "name",
                (Mark("<|tool_call_argument_begin|>", "arguments"),),
                pattern=r"(?:functions\.)?(?P<name>[^\s<>{}\[\]()\"':]+)(?::\d+)?",
            ),
            "arguments": State("scan", scan="json", then="close"),
            "close": State("space", (Mark("<|tool_call_end|>", "section"),)),
        },
        written=(
            Written(
                "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
                begin="<|tool_calls_section_begin|>",
                end="<|tool_calls_section_end|>",
            ),
        ),
    ),
)
