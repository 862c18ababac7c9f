"""The one error hierarchy of headrace.

``RequestError`` is the caller's fault and concerns one request, ``ConfigError`` is the operator's fault and stops
start-up, ``EngineError`` is ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class RequestError(HeadraceError):
    """One request cannot be served as asked. Names the parameter at fault; becomes HTTP ``status`` (4xx)."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"
    """OpenAI's word for the kind of mistake."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code


class QueueFullError(RequestError):
    """Too many requests are waiting: try again later."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class UnknownModelError(RequestError):
    """A request names a model or an adapter that is not served."""

    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class ConflictError(RequestError):
    """A request contradicts the state of the server: it may be served later."""

    status = 409
    code = "conflict"


def missing(path: str) -> RequestError:
    return RequestError(f"{path} is missing", path, code="missing_required_parameter")


def unknown(path: str, hint: str = "") -> RequestError:
    return RequestError(f"{path} is not a parameter that this server knows{hint}", path, code="unknown_parameter")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for ``unknown`` that names the known parameter with the nearest spelling; empty where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unsupported(path: str, message: str) -> RequestError:
    return RequestError(message, path, code="unsupported_parameter")


def wrong_type(path: str, accepted: str) -> RequestError:
    return RequestError(f"{path} must be {accepted}", path, code="invalid_type")


class ConfigError(HeadraceError):
    """The engine cannot be built from these arguments and this model."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContradictionError(ConfigError):
    """The model's configuration contradicts itself or says what no model can be: whoever builds it, it would be another."""


class MissingPackageError(ConfigError, ImportError):
    """Something that was asked for takes a package that is not installed; says how to install it."""


class MemoryConfigError(ConfigError):
    """The arguments ask for more than fits into the memory that there is, or that they allow."""


class EngineError(HeadraceError):
    """The engine failed; requests in flight are answered with this."""


class RankLostError(EngineError):
    """A tensor-parallel rank has ended or hangs. The cause is outside: a traceback of the engine would show nothing."""


class RankKilledError(RankLostError):
    """The rank was ended or stopped from outside, or was stuck: no request is to blame."""


class EngineDeadError(EngineError):
    """The engine is not running (restarting, or stopped for good)."""


class UnavailableError(EngineError):
    """The engine takes no requests at present, and will again: it is paused, or its weights are not whole."""


class WeightsError(EngineError):
    """A command to the weights of an engine was refused, or failed."""

    def __init__(self, message: str, status: int) -> None:
        """``status``: HTTP's. 400: the command is wrong. 409: the state does not allow it. 503: it failed."""
        super().__init__(message)
        self.status = status


def import_reason(error: BaseException) -> str:
    """An error's text; of a library that cannot be imported the cause's, which transformers leaves out."""
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split())[:300]
    if "torchvision::" not in reason:
        return reason
    return f"{reason}: the torchvision that is installed is for another build of PyTorch; without any, PIL resizes pictures"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many others there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def human_size(nbytes: int) -> str:
    """Three digits and a 1024-based unit: "1.32 GiB"."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs merged: [0, 1, 2, 5] is "0-2, 5", with an en dash."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}\N{EN DASH}{last}" for first, last in parts)
