"""``<tool_call><function=F><parameter=P>raw</parameter></function></tool_call>``."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "qwen3_coder",
        aliases=("qwen3_xml", "mimo", "nemotron"),
        hints=(("<function=", "<parameter="),),
        # Models of this family leave out <tool_call> at times.
        opens=(Mark("<tool_call>", "call"), Mark("<function=", "name")),
        states={
            "call": State("space", (Mark("<function=", "name"), Mark("</tool_call>", "after"))),
            "name": State("name", (Mark(">", "parameters"),)),
            "parameters": State(
                "space",
                (
                    Mark("<parameter=", "key"),
                    Mark("</function>", "call", ends=True),
                    Mark("</tool_call>", "after", ends=True),
                ),
            ),
            "key": State("key", (Mark(">", "value"),)),
            "value": State("value", (Mark("</parameter>", "parameters", trim=1),)),
        },
        written=(
            Written(
                "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
                between="\n",
                parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
            ),
        ),
    ),
)
