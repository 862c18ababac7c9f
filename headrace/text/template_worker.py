"""The process that renders chat templates: ``python -m headrace.text.template_worker``."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from headrace.host.jobs import answer_jobs, read_limits
from headrace.host.parent import Parent, run
from headrace.text.template_messages import Rendered, TemplateJob

_SHARE_OF_TEXT = 8
_LONGEST_REASON = 1000


def _render(job: TemplateJob, most: int) -> Rendered:
    """``most``: the largest prompt, in bytes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(  # (texts, places of what the model said)
            conversations=[job.messages],
            tools=list(job.tools) if job.tools else None,
            chat_template=job.template,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            **job.variables,
        )
        text = str(rendered[0][0])
        size = len(text.encode())
    except MemoryError:
        return Rendered(error=f"it needs more memory than {most * _SHARE_OF_TEXT} bytes (max_template_memory)")
    except Exception as error:
        # A template is a program over the request's values: whatever it raises, this request made it raise.
        return Rendered(error=str(error)[:_LONGEST_REASON])
    if size > most:
        return Rendered(error=f"the prompt has {size} bytes, more than an eighth of max_template_memory")
    return Rendered(text=text)


def main(parent: Parent) -> NoReturn:
    from transformers.utils import chat_template_utils  # noqa: F401  takes most of the process's start

    limits, decoder = read_limits(parent), msgspec.msgpack.Decoder(TemplateJob)
    answer_jobs(parent, limits, lambda data: _render(decoder.decode(data), limits.memory // _SHARE_OF_TEXT))


if __name__ == "__main__":
    run(main)
