"""GPUs by name, for reports on machines that are not here."""

from __future__ import annotations

import re

from headrace.errors import ConfigError, did_you_mean
from headrace.kernels import support
from headrace.resolve import DeviceFacts

_GPUS = {
    # Memory in MiB, as nvidia-smi shows it; compute capability, as major * 10 + minor.
    "a100-40gb": ("NVIDIA A100 40GB", 40_960, 80),
    "a100": ("NVIDIA A100 80GB", 81_920, 80),
    "a10": ("NVIDIA A10", 23_028, 86),
    "l4": ("NVIDIA L4", 23_034, 89),
    "l40s": ("NVIDIA L40S", 46_068, 89),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24_564, 89),
    "h100": ("NVIDIA H100 80GB", 81_559, 90),
    "h20": ("NVIDIA H20", 97_871, 90),
    "h200": ("NVIDIA H200", 143_771, 90),
    "b200": ("NVIDIA B200", 183_359, 100),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32_607, 120),
}
_CONTEXT = 600 << 20
"""Bytes of the CUDA context and libraries, which are in use before the engine is."""
_CORES = 16


def imagine(devices: str) -> tuple[DeviceFacts, int]:
    """One of the GPUs that ``NAME`` or ``NAME:COUNT`` names, and their number. From here on this process answers for such GPUs,
    with the packages of the cuda extra: it must run no kernel.

    Raises:
        ConfigError: no GPU of that name is known, or the number is none.
    """
    found = re.fullmatch(r"([\w.-]+)(?::(\d{1,4}))?", devices.lower())
    if found is None or found[2] == "0":
        raise ConfigError(f"devices is {devices!r}, and must be a GPU or GPU:COUNT, such as h200:4", "devices")
    if found[1] not in _GPUS:
        known = f"; known are {', '.join(sorted(_GPUS))}"
        raise ConfigError(
            f"devices is {devices!r}: no GPU {found[1]} is known{did_you_mean(found[1], _GPUS)}{known}", "devices"
        )
    name, memory, capability = _GPUS[found[1]]
    support.plan_for(capability)
    facts = DeviceFacts(
        device="cuda",
        name=f"{name} (not this machine)",
        instructions=frozenset({f"sm{capability}"}),
        num_cores=_CORES,
        available_memory=(memory << 20) - _CONTEXT,
        total_memory=memory << 20,
    )
    return facts, int(found[2] or 1)
