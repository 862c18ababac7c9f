"""The memory ledger: a line for each use of memory. On a GPU they sum up to what ``gpu_memory_utilization`` allows."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import Decision, EngineConfig, MemoryLine
from headrace.engine.info import IN_USE_BY_OTHERS, NOT_USED
from headrace.errors import human_size
from headrace.model_spec import ModelSpec
from headrace.models.size import adapter_lines, weight_bytes
from headrace.quant.registry import QUANTIZATIONS, refusal
from headrace.resolve import DeviceFacts
from headrace.resolve.memory import CUDA_SLACK
from headrace.resolve.model import engine_facts
from headrace.runner.parts.media import MediaTables
from headrace.startup.profile import Profile

_FOR = "CUDA graphs, slots, libraries and fragments"
_OTHERS = "other processes, the CUDA context and libraries"


def ledger(
    weights: Sequence[MemoryLine], config: EngineConfig, held: Sequence[tuple[str, int]], profile: Profile | None
) -> list[MemoryLine]:
    """The lines of an engine that has started.

    Args:
        held: (what, bytes) of what the runner holds; the KV cache, which has separate lines, is left out.
        profile: of the GPU; None: on a CPU, where nothing is reserved beyond what is held.
    """
    beside = [MemoryLine(name, nbytes) for name, nbytes in held if name != "KV cache"]
    if profile is not None and profile.vision:
        # What they may take is held back, whatever they take now.
        beside = [line for line in beside if line.name != MediaTables.memory_label]
    if profile is None:
        return [*weights, *cache_lines(config), *filter(_some, beside)]
    other = profile.held - sum(line.nbytes for line in weights)
    # A workspace that has grown since the profile was made is taken from the slack, as graphs and slots are.
    spent = sum(line.nbytes for line in beside) - profile.workspaces
    left = profile.slack - spent
    if left >= 0:
        slack = MemoryLine("slack", left, f"left of {profile.slack:,} bytes that are held back for {_FOR}")
    else:
        slack = MemoryLine("slack", 0, f"{spent:,} bytes were taken where {profile.slack:,} were held back for {_FOR}")
    lines = [
        MemoryLine(IN_USE_BY_OTHERS, profile.others, _OTHERS),
        *weights,
        MemoryLine("tensors beside the weights", max(other, 0), "what PyTorch holds else, and rounds up to"),
        MemoryLine("activations", profile.activations, "measured: the most that the largest step takes"),
        MemoryLine("vision encoder, activations and features", profile.vision, "measured, and mm_encoder_cache_bytes"),
        *cache_lines(config),
        *beside,
        slack,
        _unused(profile.room - config.cache.nbytes),
    ]
    return [line for line in lines if line.nbytes or line is slack]


def planned_ledger(config: EngineConfig, device: DeviceFacts) -> list[MemoryLine]:
    """Lines of an engine that was configured but not built: weights are estimated."""
    args = config.args
    asked = config.quantization, device.device, args.quantize_head, args.quantization_ignore
    estimate = weight_bytes(config.model, config.dtype, *asked, copies=device.keeps_copies)
    weights = MemoryLine("weights", estimate, "estimated: --load measures it")
    lines = [weights, *adapter_lines(config.model, config.dtype, args), *cache_lines(config)]
    if not device.cuda:
        return lines
    others = device.total_memory - device.available_memory
    lines = [MemoryLine(IN_USE_BY_OTHERS, others, _OTHERS), *lines]
    why = f"held back for {_FOR}; activations and workspaces, which --load measures, come off the KV cache"
    lines.append(MemoryLine("slack", CUDA_SLACK, why))
    budget = int(config.args.gpu_memory_utilization * device.total_memory)
    lines.append(_unused(budget - sum(line.nbytes for line in lines)))
    return list(filter(_some, lines))


def other_formats(config: EngineConfig, device: DeviceFacts) -> list[Decision]:
    """The bytes of a native model's weights in each number format, and why this engine cannot have it."""
    if not isinstance(config.model, ModelSpec):
        return []
    engine = engine_facts(config.args, config.model, config.dtype, device)
    floats = human_size(weight_bytes(config.model, config.dtype, "none", device.device))
    lines = [Decision(f"weights in {config.dtype}", floats, "--quantization none")]
    for name, quantization in QUANTIZATIONS[device.device].items():
        if not quantization.rounding:
            continue
        limit = refusal(name, engine)
        why = f"--quantization {name}" if limit is None else f"not here: {limit.reason}"
        more = ", with copies in floats for many rows" if quantization.copies and device.keeps_copies else ""
        nbytes = human_size(weight_bytes(config.model, config.dtype, name, device.device, copies=device.keeps_copies))
        lines.append(Decision(f"weights in {name}", f"at most {nbytes}", why + more))
    return lines


def _unused(nbytes: int) -> MemoryLine:
    return MemoryLine(NOT_USED, max(nbytes, 0), "gpu_memory_utilization would allow it, and the KV cache does not take it")


def _some(line: MemoryLine) -> bool:
    return line.nbytes > 0


def cache_lines(config: EngineConfig) -> list[MemoryLine]:
    """Bytes of the KV cache: those for blocks, and those that no block uses."""
    cache, arena = config.cache, config.cache.arena
    if not cache.shared:
        (count,) = cache.num_blocks
        detail = f"{count - 1} blocks of {cache.block_size} tokens and the null block, {cache.dtype}"
        return [MemoryLine("KV cache", cache.nbytes, detail)]
    blocks = ", ".join(
        f"{group.name} {size:,} bytes ({len(group.layers)} layer{'s' * (len(group.layers) > 1)})"
        for group, size in zip(cache.groups, arena.block_bytes, strict=False)
    )
    if cache.states is not None:
        blocks += f"; the state of a sequence, {cache.states.block_bytes:,} bytes ({len(cache.states.planes)} layers)"
    detail = f"shared by all groups; a block of {cache.block_size} tokens, {cache.dtype}: {blocks}"
    return [
        MemoryLine("KV cache", arena.capacity, detail),
        MemoryLine("KV cache, null block", cache.nbytes - arena.capacity, "the largest group's, and what does not divide"),
    ]
