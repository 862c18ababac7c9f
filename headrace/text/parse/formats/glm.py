"""``<tool_call>F<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "glm45",
        aliases=("glm47", "glm"),
        hints=(("<arg_key>",),),
        opens=(Mark("<tool_call>", "name"),),
        states={
            "name": State("name", (Mark("<arg_key>", "key"), Mark("</tool_call>", "after", ends=True))),
            "key": State("key", (Mark("</arg_key>", "between"),)),
            "between": State("space", (Mark("<arg_value>", "value"),)),
            "value": State("value", (Mark("</arg_value>", "parameters"),)),
            "parameters": State("space", (Mark("<arg_key>", "key"), Mark("</tool_call>", "after", ends=True))),
        },
        written=(
            Written(
                "<tool_call>NAME\nPARAMETERS</tool_call>",
                between="\n",
                parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            ),
        ),
    ),
)
