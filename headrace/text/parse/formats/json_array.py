"""A marker, then a JSON array of calls, or one call."""

from headrace.text.parse.format import Format, Mark, State


def _marked(name: str, openings: tuple[str, ...], closing: str = "", aliases: tuple[str, ...] = ()) -> Format:
    states = {"call": State("scan", scan="calls", then="close" if closing else "after")}
    if closing:
        states["close"] = State("space", (Mark(closing, "after"),))
    opens = tuple(Mark(opening, "call") for opening in openings)
    # The closing marker tells formats with the same opening apart.
    hints = ((closing,), (openings[0],)) if closing else ((openings[0],),)
    return Format(name, aliases, hints=hints, opens=opens, states=states)


FORMATS = (
    _marked("phi4_mini_json", ("functools", "<|tool_call|>"), "<|/tool_call|>"),
    _marked("nemotron_json", ("<TOOLCALL>",), "</TOOLCALL>"),
    _marked("granite", ("<|tool_call|>",)),
    _marked("jamba", ("<tool_calls>",), "</tool_calls>"),
    _marked("internlm", ("<|action_start|><|plugin|>",), "<|action_end|>"),
    Format(
        "xlam",
        opens=(Mark("<tool_calls>", "call"), Mark("[TOOL_CALLS]", "call")),
        lead={"[": "call"},
        states={"call": State("scan", scan="calls", then="after")},
    ),
)
