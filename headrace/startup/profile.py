"""Measures how much GPU memory is left for KV beside the weights, by running the largest possible step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from headrace.attention.backend import AttentionBackend, LayerCache, distinct, workspace_bytes
from headrace.attention.context import ForwardContext
from headrace.cache.planes import allocate
from headrace.config import EngineConfig
from headrace.models.interface import HiddenStates, Model, ModelInputs
from headrace.models.kinds import warm_up
from headrace.resolve.memory import CUDA_SLACK
from headrace.runner.build import make_backends
from headrace.runner.largest import largest_step
from headrace.runner.parts.states import padding_states


@dataclasses.dataclass(frozen=True)
class Profile:
    """Use of a GPU's memory during the largest step, in bytes. The parts sum up to ``total``."""

    total: int
    """Bytes that ``gpu_memory_utilization`` allows."""
    others: int
    """Bytes of other processes, and of the CUDA context and libraries in this one."""
    held: int
    """Bytes that PyTorch holds when no step runs: the weights."""
    activations: int
    """The most that the step takes at once, beside workspaces."""
    workspaces: int
    """Bytes that attention backends keep from step to step."""
    vision: int = 0
    """The most that the vision encoder takes at once, beside the step that it overlaps with, and the features that are kept."""
    libraries: int = 0
    """Bytes of ``others`` that libraries of this process took for the step: their code on the device, and their tables."""
    slack: int = CUDA_SLACK
    """Bytes held back for what comes once the cache is there: the slots' tables, CUDA graphs, fragments."""

    @property
    def room(self) -> int:
        """Bytes left for KV."""
        return self.total - self.others - self.held - self.activations - self.workspaces - self.vision - self.slack


@torch.inference_mode()
def measure(
    model: Model,
    config: EngineConfig,
    encode: Sequence[Callable[[], object]] = (),
    dry: AbstractContextManager[object] | None = None,
) -> Profile:
    """Runs the largest possible step on the model's GPU, and calls of the vision encoder.

    ``dry``: compiles the kernels of what runs within it, and launches none. None: kernels are compiled one by one.
    """
    held, before = torch.cuda.memory_allocated(), _others()
    few = dataclasses.replace(config.cache, nbytes=config.cache.arena.reserved)
    caches = allocate(few, config.model, config.device, few.dtype)
    backends = make_backends(config)
    if config.graph_rows:
        for backend in distinct(backends):
            backend.reserve(torch.device(config.device))
    most = config.scheduler.max_num_batched_tokens
    # Sparse prompts read on the host what kernels have chosen.
    if dry is not None and config.sparse is None:
        with dry:
            _largest_step(model, config, caches, backends)
            warm_up(model, most)
    torch.cuda.reset_peak_memory_stats()
    _largest_step(model, config, caches, backends)
    warm_up(model, most)
    if config.sparse is not None and config.sparse.routed:
        # Other rows run while the hidden states of a piece are paused.
        paused = paused_states(config, config.sparse.max_exact_tokens)
        _largest_step(model, config, caches, backends, most)
        del paused
    torch.cuda.synchronize()
    workspaces, peak = workspace_bytes(backends), torch.cuda.max_memory_allocated()
    vision = max(map(_peak, encode), default=0)
    if vision:
        vision += config.args.mm_encoder_cache_bytes
    torch.cuda.empty_cache()
    # The null block, which is all that the step saw, is the KV cache's.
    activations, libraries = peak - held - workspaces - few.nbytes, max(_others() - before, 0)
    return Profile(_allowed(config), _others(), held, activations, workspaces, vision, libraries)


def profile_of(config: EngineConfig, *, activations: int, workspaces: int, vision: int, libraries: int) -> Profile:
    """The profile of a step that has not run in this process: its own parts are known, and the others are as they are now."""
    held, others = torch.cuda.memory_allocated(), _others() + libraries
    return Profile(_allowed(config), others, held, activations, workspaces, vision, libraries)


def _allowed(config: EngineConfig) -> int:
    """Bytes of the GPU that the engine may take."""
    return int(config.args.gpu_memory_utilization * torch.cuda.mem_get_info()[1])


def _others() -> int:
    """Bytes that are neither free nor PyTorch's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _peak(work: Callable[[], object]) -> int:
    """The most bytes that work takes beside what is held."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def paused_states(config: EngineConfig, most: int) -> HiddenStates:
    """The largest that a piece of up to ``most`` tokens may leave between two of its steps."""
    shape = (2, min(config.scheduler.max_model_len, most), config.model.hidden_size)
    return HiddenStates(*torch.empty(shape, dtype=getattr(torch, config.dtype), device=config.device))


def _largest_step(
    model: Model, config: EngineConfig, caches: list[LayerCache], backends: list[AttentionBackend], tokens: int | None = None
) -> None:
    """Runs the maximum number of tokens, in prompts of maximum length, and logits for the maximum number of sampled rows.

    Their KV goes nowhere, and what they see is the null block's. ``tokens``: see ``largest_step``.
    """
    step, positions = largest_step(config, tokens)
    for backend in distinct(backends):
        backend.plan(step)
    few = dataclasses.replace(config.cache, nbytes=config.cache.arena.reserved)
    context = ForwardContext(step, caches, backends, states=padding_states(few, caches, step))
    hidden = model(ModelInputs(torch.zeros_like(positions), positions), context)
    logits = model.logits(hidden[: min(config.scheduler.max_num_seqs, len(positions))])
    # The sampler's own copy, where rows ask for logprobs.
    logits.clone()
