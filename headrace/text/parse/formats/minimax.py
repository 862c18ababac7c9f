"""``<minimax:tool_call><invoke name="F"><parameter name="P">v</parameter></invoke></minimax:tool_call>``."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "minimax_m2",
        aliases=("minimax",),
        hints=(("<minimax:tool_call>",),),
        opens=(Mark("<minimax:tool_call>", "section"),),
        states={
            "section": State("space", (Mark('<invoke name="', "name"), Mark("</minimax:tool_call>", "after"))),
            "name": State("name", (Mark('">', "parameters"),)),
            "parameters": State(
                "space",
                (
                    Mark('<parameter name="', "key"),
                    Mark("</invoke>", "section", ends=True),
                    Mark("</minimax:tool_call>", "after", ends=True),
                ),
            ),
            "key": State("key", (Mark('">', "value"),)),
            "value": State("value", (Mark("</parameter>", "parameters", trim=1),)),
        },
        written=(
            Written(
                '<invoke name="NAME">\nPARAMETERS</invoke>\n',
                begin="<minimax:tool_call>\n",
                end="</minimax:tool_call>",
                parameter='<parameter name="KEY">VALUE</parameter>\n',
            ),
        ),
    ),
)
