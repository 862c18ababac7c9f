"""TemplateRenderer: renders chat templates in a process with limits.

A template is a program that comes with the model, over values that come with the request: either may make it loop for ever or
build a string of any size, already while Jinja folds its constants. Jinja's sandbox limits neither. In a thread, nothing can
end one operation of the interpreter (``10 ** (10 ** 9)``, ``"x" * 10 ** 12``), and counting steps in the generated code would
have to know the cost of each filter and method. The process imports what its owner would import otherwise, beside it, and a
job costs a fraction of a millisecond more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.host.jobs import EndedProcess, JobProcesses, ProcessLimits
from headrace.text.template_messages import Rendered, TemplateJob

_DEFAULTS = ProcessLimits(seconds=2.0, memory=2**29)


class TemplateRenderer:
    """Renders one job after another. May be used from several threads."""

    def __init__(self, limits: ProcessLimits = _DEFAULTS) -> None:
        """``limits``: of one rendering; the prompt may have an eighth of the memory."""
        self._limits = limits
        self._process = JobProcesses("headrace.text.template_worker", Rendered, limits, "renders chat templates")

    def render(self, job: TemplateJob) -> str:
        """The text of the conversation.

        Raises:
            RequestError: the template cannot render these messages, or not within the limits.
            EngineError: the process could not be started.
        """
        try:
            data = msgspec.msgpack.encode(job, enc_hook=_plain)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the messages cannot be passed to the chat template: {error}", "messages") from error
        answer = self._answer(data)
        if answer.error is not None:
            raise RequestError(f"the chat template cannot render these messages: {answer.error}", "messages")
        return answer.text

    def close(self) -> None:
        """Ends the process that renders; another job starts it again."""
        self._process.close()

    def _answer(self, data: bytes) -> Rendered:
        answer = self._process.call(data)
        if not isinstance(answer, EndedProcess):
            return answer
        if answer.out_of_time:
            return Rendered(error=f"it takes longer than {self._limits.seconds} seconds (max_template_seconds)")
        return Rendered(error=f"its process ended with status {answer.status}")


def _plain(value: Any) -> str:
    """Returns the text that templates see in place of a value that is not JSON; equals transformers'."""
    return f"<{type(value).__name__}>"
