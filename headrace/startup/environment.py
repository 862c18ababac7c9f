"""Device, memory and cores available to this process, and facts that help to explain a run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import torch

import headrace
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.host import wait
from headrace.kernels import native, support
from headrace.kernels.cuda_launch import missing
from headrace.resolve import DeviceFacts

_CGROUPS = Path("/sys/fs/cgroup")
_TELLING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")


def probe(device: str = "auto") -> DeviceFacts:
    """The device that an engine shall run on, its memory, and the cores that this process may use.

    Args:
        device: cpu, cuda, or auto: a CUDA device if there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but PyTorch finds no CUDA device here", "device")
    return _cuda() if device != "cpu" and torch.cuda.is_available() else _host()


def take_device(args: EngineArgs, replica: int) -> None:
    """Makes a replica's CUDA device the current one of this process, or its devices the first ones that its ranks see. Every
    device stays visible: hiding the others would keep processes from mapping each other's memory.

    Raises:
        ConfigError: there are fewer devices than replicas, with their ranks.
    """
    if not torch.cuda.is_available():
        return
    ranks, count = args.tensor_parallel_size, torch.cuda.device_count()
    if args.data_parallel_size * ranks > count:
        each = "its own" if ranks == 1 else f"{ranks} of its own"
        raise ConfigError(
            f"data_parallel_size is {args.data_parallel_size}, and there are {count} CUDA devices: each replica needs {each}",
            "data_parallel_size",
        )
    if ranks == 1:
        torch.cuda.set_device(replica)
        return
    names = visible_devices()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((*names[replica * ranks :], *names[: replica * ranks]))


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def share(device: DeviceFacts, replicas: int) -> DeviceFacts:
    """The part of a CPU's cores and memory that one of several replicas has."""
    if device.cuda or replicas == 1:
        return device
    return dataclasses.replace(
        device, num_cores=max(1, device.num_cores // replicas), available_memory=device.available_memory // replicas
    )


def _cuda() -> DeviceFacts:
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    return DeviceFacts(
        device="cuda",
        name=torch.cuda.get_device_name(),
        instructions=frozenset({f"sm{major}{minor}"}),
        num_cores=_cores(),
        available_memory=free,
        total_memory=total,
    )


def _host() -> DeviceFacts:
    """The CPU, its cores and memory within affinity and control groups. Compiles the native kernels if need be."""
    name, instructions = _cpu()
    return DeviceFacts(
        device="cpu",
        name=name,
        instructions=instructions,
        num_cores=_cores(),
        available_memory=_available_memory(),
        native_kernels=kernels.tile if (kernels := native.load()) is not None else "",
    )


def describe(device: DeviceFacts, num_threads: int) -> dict[str, str]:
    telling = [name for name in _TELLING if name in device.instructions] or sorted(device.instructions if device.cuda else ())
    return {
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": f"{device.device}: {device.name}",
        "instructions": " ".join(telling) or "none that matter here",
        "kernels": _gpu_kernels(device)
        if device.cuda
        else f"compiled for {device.native_kernels}"
        if device.native_kernels
        else "PyTorch's",
        "cores": str(device.num_cores),
        "threads": str(num_threads),
        "waiting threads": wait.policy(),
        "free memory": f"{device.available_memory:,} bytes",
    }


def _gpu_kernels(device: DeviceFacts) -> str:
    """The languages of a GPU's kernels, and what a Hopper GPU lacks for those in CUDA C++."""
    if f"sm{support.HOPPER_SM}" not in device.instructions:
        return "Triton's"
    reason = "" if support.planned() else missing()
    return f"Triton's alone: {reason}" if reason else "Triton's, and those in CUDA C++"


def _cpu() -> tuple[str, frozenset[str]]:
    """Name and features; no features where the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((facts.get("flags") or facts.get("features") or "").split())


def _cores() -> int:
    """Physical cores of the CPUs that this process may run on, and no more than its control group's share."""
    cpus = _allowed_cpus()
    siblings = {_siblings(cpu) for cpu in cpus}
    quota = _cgroup_cpus()
    return max(1, min(len(siblings), int(quota) if quota is not None else len(siblings)))


def _allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """The CPUs that share a core with this one, as the system writes them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_folders() -> list[Path]:
    """This process's control group and those around it."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    group = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), "")
    folder = _CGROUPS / group
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUPS))]


def _cgroup_cpus() -> float | None:
    """CPUs that the tightest quota allows."""
    quotas = []
    for folder in _cgroup_folders():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _available_memory() -> int:
    available: int = psutil.virtual_memory().available
    for folder in _cgroup_folders():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            # Cached files count as used, and are given up when memory is short.
            files = next(
                (int(line.split()[1]) for line in _read(folder / "memory.stat").splitlines() if line.startswith("file ")), 0
            )
            available = min(available, max(0, int(limit) - int(used) + files))
    return available


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
