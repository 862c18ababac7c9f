"""A marker, then a JSON array of calls, or one call."""

from dataclasses import replace

from headrace.text.parse.format import Written, marked

_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_ARRAY = Written(_CALL, begin="[", between=", ", end="]")
_LINES = Written(_CALL, begin="[\n    ", between=",\n    ", end="\n]")
_ONE = Written('{"name": "NAME", "parameters": ARGUMENTS}', begin="\n", several=False)
_PHI = marked(
    "phi4_mini_json", "calls", ("<|tool_call|>", "functools"), "<|/tool_call|>", ("functools", "<|/tool_call|>"), (_ARRAY,)
)
FORMATS = (
    # Granite's opening; the closing distinguishes it.
    replace(_PHI, written=(*_PHI.written, replace(_ARRAY, begin="functools["))),
    marked("nemotron_json", "calls", ("<TOOLCALL>",), "</TOOLCALL>", written=(_ARRAY,)),
    marked("granite", "calls", ("<|tool_call|>",), written=(_ARRAY,)),
    marked("jamba", "calls", ("<tool_calls>",), "</tool_calls>", written=(_LINES,)),
    marked("internlm", "calls", ("<|action_start|><|plugin|>",), "<|action_end|>", written=(_ONE,)),
    replace(marked("xlam", "calls", ("<tool_calls>", "[TOOL_CALLS]")), hints=(), lead={"[": "call"}, written=(_ARRAY,)),
)
