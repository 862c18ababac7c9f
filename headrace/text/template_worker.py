"""The process that renders chat templates: ``python -m headrace.text.template_worker SECONDS BYTES``.

Reads jobs from the socket that is its standard input until it is closed. Each job may use BYTES of memory and SECONDS of
processor time, after which the kernel ends the process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.text.template_messages import Rendered, TemplateJob, receive, send

_SHARE_OF_TEXT = 8
_LONGEST_REASON = 1000


def _limit_memory(size: int) -> None:
    """Bounds the address space to what the process has now and ``size`` more (Linux)."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    connection = socket.socket(fileno=0)
    from transformers.utils import chat_template_utils  # noqa: F401  takes most of the process's start

    _limit_memory(memory)
    decoder = msgspec.msgpack.Decoder(TemplateJob)
    while (data := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = msgspec.msgpack.encode(_render(decoder.decode(data), memory // _SHARE_OF_TEXT))
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data
        send(connection, answer)


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: its owner is gone, and nothing is to be written
