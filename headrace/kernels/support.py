"""Devices on which the Triton kernels run. Importing this needs no Triton."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os

import torch

MIN_SM = 80
"""Compute capability, as major * 10 + minor: older devices have no bfloat16."""
HOPPER_SM = 90
NATIVE_FP8_SM = 89
"""Devices from this capability on convert between float32 and e4m3 in hardware."""


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's function of this name takes the host a microsecond and more."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest one that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def in_pieces(*matrices: torch.Tensor) -> bool:
    """Whether every row of each matrix, whose last axis is contiguous, begins at a multiple of 16 bytes."""
    return not any((matrix.data_ptr() | matrix.stride(0) * matrix.itemsize) & 15 for matrix in matrices)


def interpreted() -> bool:
    """Whether Triton kernels that are imported now will be interpreted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_PLANNED = "HEADRACE_PLANNED_SM"


def plan_for(capability: int) -> None:
    """Makes this process answer for CUDA devices of a capability that are not here, with the packages that they need, so that
    it can say what an engine would do there. No kernel may run afterwards."""
    os.environ[_PLANNED] = str(capability)


def planned() -> bool:
    return _PLANNED in os.environ


def compute_capability(device: torch.device | str) -> int | None:
    """Major * 10 + minor; None: not a CUDA device."""
    device = torch.device(device)
    if planned():
        return int(os.environ[_PLANNED]) if device.type == "cuda" else None
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return compute_capability(device) == HOPPER_SM


def refusals(device: torch.device | str) -> list[str]:
    """Reasons why Triton kernels cannot run on a device; empty: they can."""
    installed = importlib.util.find_spec("triton")
    # Any folder of that name on the path is installed too, but has no origin.
    if (installed is None or installed.origin is None) and not planned():
        return ["Triton is not installed"]
    if torch.device(device).type != "cuda":
        return [] if interpreted() else [f"Triton kernels run on CUDA devices, or with TRITON_INTERPRET=1, not on {device}"]
    capability = compute_capability(device)
    if capability is None:
        return ["there is no CUDA device here"]
    return [] if capability >= MIN_SM else [f"Triton kernels need SM{MIN_SM} or newer, not SM{capability}"]


def fp8_refusals(device: torch.device | str) -> list[str]:
    """Reasons why a device cannot keep KV in FP8; empty: it can. A CPU can, slowly."""
    capability = compute_capability(device)
    if capability is None or capability >= MIN_SM:
        return []
    return [f"FP8 KV cache requires SM{MIN_SM}+, got SM{capability}"]


def fp8_product_refusals(device: torch.device | str) -> list[str]:
    """Reasons why a device cannot multiply FP8 by FP8; empty: it can. A CPU can, slowly."""
    capability = compute_capability(device)
    if capability is None or capability >= NATIVE_FP8_SM:
        return []
    return [f"products in FP8 require SM{NATIVE_FP8_SM}+, got SM{capability}"]


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of a launch."""

    multiprocessors: int
    shared_memory: int
    """Bytes available to one program."""


@functools.cache
def resources(device: torch.device) -> Resources:
    """Resources of a CUDA device; for others, numbers with which the interpreter takes the same branches."""
    if device.type != "cuda":
        return Resources(8, 227 << 10)
    properties = torch.cuda.get_device_properties(device)
    return Resources(properties.multi_processor_count, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def counters(owner: str, device: torch.device, count: int = 64) -> torch.Tensor:
    """``[count]`` int32 by which programs of an owner's launches meet: 0 between launches. Each stream has its own, and so have
    graphs, which are replayed one after the other: theirs exist before the first is captured, as kernels run once before."""
    captured = _counters_of(owner, device, count, None)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return captured
    return _counters_of(owner, device, count, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _counters_of(owner: str, device: torch.device, count: int, stream: int | None) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
