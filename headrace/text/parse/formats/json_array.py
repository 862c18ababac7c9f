"""A marker, then a JSON array of calls, or one call."""

from headrace.text.parse.format import Format, Mark, State


def _marked(name: str, openings: tuple[str, ...], closing: str = "", aliases: tuple[str, ...] = ()) -> Format:
    states = {"call": State("scan", scan="calls", then="close" if closing else "after")}
    if closing:
        states["close"] = State("space", (Mark(closing, "after"),))
    opens = tuple(Mark(opening, "call") for opening in openings)
    return Format(name, aliases, hints=tuple((opening,) for opening in openings), opens=opens, states=states)


FORMATS = (
    _marked("phi4_mini_json", ("functools",)),
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
