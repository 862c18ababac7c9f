"""Messages between tensor-parallel ranks and the process that started them: msgspec tagged unions.

Each rank gets the same messages, but for the first. Questions are answered with ``Done``, ``ConfigRefused`` or ``Failed``; on
its way to an answer a rank may ask what all ranks agree on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import torch

from headrace.config import EngineArgs
from headrace.core.commands import RankCommand
from headrace.core.plan import StepResult
from headrace.core.weights import TensorSpec
from headrace.host.tagged import Tagged
from headrace.sources.adapter import AdapterFiles
from headrace.weights.update import check_whole

_PIECE_BYTES = 2**28
"""Most bytes of a tensor in one message."""


# To a rank


class RankStart(Tagged, frozen=True):
    """The first message. Answered with ``Loaded`` as plain data."""

    args: EngineArgs
    rank: int
    size: int
    store: int
    """Descriptor of the file by which the ranks find each other."""


class Plan(Tagged, frozen=True):
    """A plan to execute. Not answered."""

    plan: bytes
    """The plan in the form of ``encode_plan``."""


class Collect(Tagged, frozen=True):
    """Answered with Collected."""

    step: int


class ShowTokens(Tagged, frozen=True):
    """Answered with Tokens, or None where the step's result is not kept."""

    step: int


class Ask(Tagged, frozen=True):
    """A method of the executor to call, and answer with its result."""

    name: Literal["capture_next", "memory", "graphs"]


class UpdateWeights(Tagged, frozen=True):
    """The bytes of the tensors follow, each in separate messages (``tensor_pieces``). Answered with how many were written."""

    tensors: list[TensorSpec]


class RankWeights(Tagged, frozen=True):
    """A command to the rank's weights. Answered with RankReply."""

    command: RankCommand


class LoadAdapter(Tagged, frozen=True):
    """``LocalExecutor.load_adapter``. Answered with its result or with ConfigRefused."""

    files: AdapterFiles
    wait: bool


class DropAdapter(Tagged, frozen=True):
    """Not answered."""

    digest: str


class Agreed(Tagged, frozen=True):
    """The answer to Least or Alike."""

    value: int


ToRank = RankStart | Plan | Collect | ShowTokens | Ask | UpdateWeights | RankWeights | LoadAdapter | DropAdapter | Agreed


# From a rank


class Done(Tagged, frozen=True):
    """An answer, of the type that the question names."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")

    @classmethod
    def of(cls, value: Any) -> Done:
        return cls(msgspec.Raw(msgspec.msgpack.encode(value)))


class Least(Tagged, frozen=True):
    """Asks for the least number of all ranks."""

    number: int


class Alike(Tagged, frozen=True):
    """Asks whether all ranks have the same value."""

    digest: bytes


class ConfigRefused(Tagged, frozen=True):
    """A ConfigError."""

    message: str
    param: str | None


class Failed(Tagged, frozen=True):
    """The last message of a rank that cannot go on."""

    message: str


FromRank = Done | Least | Alike | ConfigRefused | Failed


class Collected(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes
    """Hash of the results on which ranks must agree in the step; see ``digest``."""
    result: StepResult | None
    """None: the rank is not rank 0."""


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Results of a step on which ranks must agree."""

    seq_ids: list[int]
    token_ids: list[list[int]]
    errors: list[int]

    @classmethod
    def of(cls, result: StepResult) -> Tokens:
        return cls(result.seq_ids, result.token_ids, sorted(result.errors))


def digest(result: StepResult) -> bytes:
    """Returns the hash of the results on which ranks must agree in a step."""
    agreed = msgspec.msgpack.encode((result.step, Tokens.of(result)))
    return hashlib.blake2b(agreed, digest_size=4).digest()


encode: Callable[[ToRank | FromRank], bytes] = msgspec.msgpack.Encoder().encode
decode_to_rank: Callable[[bytearray], ToRank] = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank: Callable[[bytearray], FromRank] = msgspec.msgpack.Decoder(FromRank).decode


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises: ConfigError: it is not a tensor with values, or has a part of them."""
    check_whole(name, tensor)
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def empty_tensor(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU, where they are."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    for first in range(0, len(data), _PIECE_BYTES):
        yield data[first : first + _PIECE_BYTES]
