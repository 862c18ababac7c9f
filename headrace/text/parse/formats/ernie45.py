"""As hermes; the answer is in ``<response>``."""

import dataclasses

from headrace.text.parse.formats import hermes

FORMATS = (
    dataclasses.replace(
        hermes.FORMATS[0],
        name="ernie45",
        aliases=(),
        hints=(("<tool_call>", "<response>"),),
        wrap=("<response>", "</response>"),
    ),
)
