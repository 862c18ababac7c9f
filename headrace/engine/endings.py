"""Last deltas of requests that end without the engine's answer."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.request import Request
from headrace.errors import EngineDeadError, HeadraceError, RequestError
from headrace.outputs import OutputDelta


def failed(request: Request, error: HeadraceError) -> Iterator[OutputDelta]:
    """The last delta of each sample of a request that ends with an error."""
    at_fault = error if isinstance(error, RequestError) else None
    for index in range(request.sampling.n):
        yield OutputDelta(
            request_id=request.request_id,
            index=index,
            finish_reason="error",
            error=str(error),
            client_error=at_fault is not None,
            error_code=None if at_fault is None else at_fault.code,
            error_param=None if at_fault is None else at_fault.param,
            engine_died=isinstance(error, EngineDeadError),
        )


def aborted(request: Request) -> Iterator[OutputDelta]:
    """The only delta of each sample of a request that is aborted before an engine has it."""
    for index in range(request.sampling.n):
        yield OutputDelta(request_id=request.request_id, index=index, finish_reason="abort")
