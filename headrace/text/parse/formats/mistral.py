"""``[TOOL_CALLS][{"name": ..., "arguments": ...}]`` (to v7) and ``[TOOL_CALLS]name[ARGS]{...}`` (from v11)."""

from headrace.text.parse.format import Format, Mark, State, Written

FORMATS = (
    Format(
        "mistral",
        hints=(("[TOOL_CALLS]",),),
        opens=(Mark("[TOOL_CALLS]", "name"),),
        states={
            "name": State(
                "name",
                (Mark("[ARGS]", "arguments"), Mark("[CALL_ID]", "id"), Mark("{", "arguments", keep=True)),
                lead={"[": "calls", "{": "calls"},
            ),
            "id": State("skip", (Mark("[ARGS]", "arguments"),)),
            "arguments": State("scan", scan="json", then="after"),
            "calls": State("scan", scan="calls", then="after"),
        },
        ids="alphanumeric9",
        written=(
            Written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
            Written('{"name": "NAME", "arguments": ARGUMENTS}', begin="[TOOL_CALLS][", between=", ", end="]"),
        ),
    ),
)
