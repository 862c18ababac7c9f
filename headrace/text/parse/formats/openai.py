"""Harmony (gpt-oss): messages with a channel and, for calls, a recipient in their header."""

from headrace.text.parse.format import Format, Mark, Reasoning, State, Written

_HEADER = (Mark("<|channel|>", "start"), Mark("<|constrain|>", "start"), Mark("<|message|>", "route"))
_ENDS = (
    Mark("<|end|>", "after"),
    Mark("<|return|>", "after"),
    Mark("<|call|>", "after"),
    Mark("<|start|>", "start"),
    Mark("<|channel|>", "start"),
)

FORMATS = (
    Format(
        "openai",
        aliases=("harmony", "gpt_oss", "gpt-oss"),
        hints=(("<|channel|>", "<|message|>"),),
        states={
            "start": State("header", _HEADER),
            "after": State("after", _ENDS),
            "content": State("content", _ENDS),
            "reasoning": State("reasoning", _ENDS),
            "call": State("scan", scan="json", then="after"),
        },
        whole=True,
        # The header of a call ends the turn with its message: the token after it, <|call|>, ends the sequence.
        written=(Written("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS", several=False),),
        thought=Reasoning("openai", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        answer="<|channel|>final<|message|>",
    ),
)
