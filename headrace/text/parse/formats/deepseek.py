"""DeepSeek V3: JSON in a fence; V3.1: JSON; V3.2 and V4: parameters in tags."""

from headrace.text.parse.format import Format, Mark, State, Written

_SECTION, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_SECTION_STATE = State("space", (Mark(_CALL, "call"), Mark(_END, "after")))
_DSML, _CLOSE, _KINDS = "<｜DSML｜", "</｜DSML｜", ("function_calls>", "tool_calls>")

FORMATS = (
    Format(
        "deepseek_v3",
        hints=((_CALL, "```json"),),
        opens=(Mark(_SECTION, "section"),),
        states={
            "section": _SECTION_STATE,
            "call": State("skip", (Mark(_SEPARATOR, "name"),)),
            "name": State("name", (Mark("```json", "arguments"),)),
            "arguments": State("scan", scan="json", then="fence"),
            "fence": State("space", (Mark("```", "close"), Mark(_CALL_END, "section"))),
            "close": State("space", (Mark(_CALL_END, "section"),)),
        },
        written=(
            Written(
                f"{_CALL}function{_SEPARATOR}NAME\n```json\nARGUMENTS\n```{_CALL_END}", begin=_SECTION, between="\n", end=_END
            ),
        ),
    ),
    Format(
        "deepseek_v31",
        hints=((_CALL,),),
        opens=(Mark(_SECTION, "section"),),
        states={
            "section": _SECTION_STATE,
            "call": State("name", (Mark(_SEPARATOR, "arguments"),)),
            "arguments": State("scan", scan="json", then="close"),
            "close": State("space", (Mark(_CALL_END, "section"),)),
        },
        written=(Written(f"{_CALL}NAME{_SEPARATOR}ARGUMENTS{_CALL_END}", begin=_SECTION, end=_END),),
    ),
    Format(
        "deepseek_v32",
        aliases=("deepseek_v4",),
        hints=(("｜DSML｜",),),
        opens=tuple(Mark(f"{_DSML}{kind}", "section") for kind in _KINDS),
        states={
            "section": State(
                "space", (Mark(f'{_DSML}invoke name="', "name"), *(Mark(f"{_CLOSE}{kind}", "after") for kind in _KINDS))
            ),
            "name": State("name", (Mark('">', "parameters"),)),
            "parameters": State(
                "space",
                (
                    Mark(f'{_DSML}parameter name="', "key"),
                    Mark(f"{_CLOSE}invoke>", "section", ends=True),
                    *(Mark(f"{_CLOSE}{kind}", "after", ends=True) for kind in _KINDS),
                ),
            ),
            "key": State("key", (Mark('" string="', "flag"), Mark('">', "value"))),
            "flag": State("flag", (Mark('">', "value"),)),
            "value": State("value", (Mark(f"{_CLOSE}parameter>", "parameters"),)),
        },
        written=(
            Written(
                f'{_DSML}invoke name="NAME">\nPARAMETERS{_CLOSE}invoke>\n',
                begin=f"{_DSML}function_calls>\n",
                end=f"{_CLOSE}function_calls>",
                parameter=f'{_DSML}parameter name="KEY" string="STRING">VALUE{_CLOSE}parameter>\n',
            ),
        ),
    ),
)
