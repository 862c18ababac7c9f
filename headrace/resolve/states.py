"""State layers: what a sequence keeps of them, and the features that do not work with them yet."""

from __future__ import annotations

from collections import Counter

from headrace.config import CacheConfig, EngineArgs
from headrace.core.states import snapshot_period
from headrace.errors import ConfigError, human_size
from headrace.model_spec import AnySpec, ModelSpec, StateGroup
from headrace.resolve.facts import DecisionLog, DeviceFacts
from headrace.resolve.memory import state_grid

PENDING = 3
"""Tokens that the state of a gated delta rule may lack on a GPU: a decode row writes it in every fourth step."""

KINDS = {
    "gdn": "gated delta rule",
    "kda": "Kimi delta attention",
    "ssd": "Mamba-2",
    "mamba1": "Mamba-1",
    "lightning": "lightning attention",
    "conv": "short convolution",
}


def state_group(args: EngineArgs, model: AnySpec, dtype: str, device: DeviceFacts, log: DecisionLog) -> StateGroup | None:
    """Returns what a sequence keeps of the model's state layers; None: it has none.

    Raises:
        ConfigError: a feature that was asked for does not work with state layers.
    """
    if not model.states:
        if args.state_snapshot_bytes is not None:
            log.note("state_snapshot_bytes", "no effect", "the model has no state layers")
        return None
    if args.sparse_prefill not in ("auto", "off"):
        raise ConfigError(
            f"{model.architecture} has state layers: its prompts attend densely, set sparse_prefill off", "sparse_prefill"
        )
    if not model.layers:
        raise ConfigError(f"{model.architecture} has state layers alone: headrace needs an attention layer yet", "model")
    # With deterministic, prompts are absorbed as decode rows are. Foreign models' kernels keep no tokens.
    pending = PENDING if device.cuda and isinstance(model, ModelSpec) and not args.deterministic else 0
    group = StateGroup(tuple(spec.planes(dtype, args.state_dtype, pending) for spec in model.states))
    for kind, count in Counter(spec.kind for spec in model.states).items():
        log.note("state layers", f"{count} of {model.num_layers}", f"{KINDS[kind]}: {_geometry(model, kind)}")
    return group


def _geometry(model: AnySpec, kind: str) -> str:
    spec = next(spec for spec in model.states if spec.kind == kind)
    parts = []
    if spec.heads:
        keys = f"{spec.key_heads} key, " if spec.key_heads else ""
        parts.append(f"{keys}{spec.heads} value heads of {spec.key_dim} by {spec.value_dim}")
    if spec.conv is not None:
        parts.append(f"convolution {spec.conv.width} over {spec.conv.channels:,} channels")
    return ", ".join(parts)


def batched_tokens(args: EngineArgs, num_seqs: int, num_batched: int, log: DecisionLog) -> int:
    """Returns the tokens of a step with which prompts advance by tiles while every other sequence decodes."""
    least = state_grid(args.block_size) + num_seqs
    if num_batched >= least:
        return num_batched
    log.note("max_num_batched_tokens", least, f"chunks of prompts end at multiples of {least - num_seqs} tokens")
    return least


def note_sizes(cache: CacheConfig, num_seqs: int, log: DecisionLog) -> None:
    """Notes the bytes of a sequence's state, and of snapshots."""
    if cache.states is None:
        return
    size, per_token = cache.states.block_bytes, sum(group.bytes_per_token for group in cache.groups)
    dtypes = ", ".join(dict.fromkeys(plane.dtype for planes in cache.states.planes for plane in planes))
    log.note("state of a sequence", f"{size:,} bytes", f"{dtypes}: as much as the KV of {size // per_token:,} tokens")
    capacity = cache.arena.capacity
    room = f"of {human_size(capacity)} with KV"
    if num_seqs * size > capacity:
        room = f"more than the {human_size(capacity)} that there are: at most {capacity // size} run at a time, others wait"
    log.note("states of all sequences", human_size(num_seqs * size), room)
    if not cache.enable_prefix_caching:
        log.note("state snapshots", "none", "the prefix cache is off")
        return
    period = snapshot_period(cache)
    where = f"at the ends of prompts and turns, at branches, and every {period:,} tokens"
    log.note("state snapshots", f"at most {cache.state_snapshot_bytes // size}", where)
