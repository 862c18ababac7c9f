"""AttentionBackend: what every backend does, and the metadata of a step that it plans from."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from headrace.attention.sparse_rows import SparseRows
from headrace.cache.layer import LayerCache as LayerCache
from headrace.kernels.attention.unfinished import Unfinished
from headrace.model_spec import AttentionSpec
from headrace.model_spec.kv import FP8_KV

Modes = frozenset[str]
NO_MODES: Modes = frozenset()
VISIBLE_ENDS = "visible_ends"
"""The mode of layers whose tokens may see later tokens, up to ``AttentionInputs.visible_ends``."""


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """One step as attention sees it. R rows (decode first, then prefill), T tokens packed row after row.

    Host mirrors (``*_host``) are exact unless the step is ``bounded``.
    """

    num_decode_rows: int
    query_start: torch.Tensor
    """``[R + 1]`` int32: row -> its first token in the packed batch. The first is not 0 in a part of a step (``rows``)."""
    seq_lens: torch.Tensor
    """``[R]`` int32: tokens of the row in the cache once this step's are written."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Per cache group, ``[T]`` int64: ``block * block_size + offset`` where the token's KV goes; -1 writes nothing."""
    block_tables: tuple[torch.Tensor, ...]
    """Per cache group, ``[R, B]`` int32: block numbers of the row, 0 (the null block) past its end."""
    query_start_host: np.ndarray
    seq_lens_host: np.ndarray
    bounded: bool = False
    """Host mirrors are upper bounds: the step may be captured in a CUDA graph, and replayed for other rows."""
    visible_ends: torch.Tensor | None = None
    """``[T]`` int32 on the device, for layers that pass it on in ``AttentionInputs``; None: no token sees behind itself."""
    sparse: SparseRows | None = None
    """The last rows, which attend sparsely in the layers that can; None: there are none."""
    longest: int = 0
    """Upper bound of the tokens of a row in any step; 0: unknown."""

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_host[-1] - self.query_start_host[0])

    @cached_property
    def tokens(self) -> slice:
        """The rows' tokens in the packed batch."""
        return slice(int(self.query_start_host[0]), int(self.query_start_host[-1]))

    @cached_property
    def query_counts(self) -> np.ndarray:
        """``[R]``: tokens of each row in this step."""
        return np.diff(self.query_start_host)

    @cached_property
    def single_query(self) -> bool:
        """Whether each row has one token."""
        return bool((self.query_counts == 1).all())

    def densely(self) -> StepMetadata:
        """Returns the same step with all rows attending densely."""
        return dataclasses.replace(self, sparse=None)

    def rows(self, first: int, end: int) -> StepMetadata:
        """Rows ``first`` to ``end`` as views. Tokens keep their places in the packed batch."""
        if first == 0 and end == self.num_rows:
            return self
        return dataclasses.replace(
            self,
            num_decode_rows=max(0, min(end, self.num_decode_rows) - first),
            query_start=self.query_start[first : end + 1],
            seq_lens=self.seq_lens[first:end],
            block_tables=tuple(table[first:end] for table in self.block_tables),
            query_start_host=self.query_start_host[first : end + 1],
            seq_lens_host=self.seq_lens_host[first:end],
        )


class AttentionInputs(NamedTuple):
    """One layer's inputs in the planned step."""

    q: torch.Tensor
    """``[T, num_heads, head_dim]``, rotated."""
    cache: LayerCache
    """The layer's KV, this step's tokens included."""
    sinks: torch.Tensor | None = None
    """``[num_heads]`` float32 logits, for layers that have them."""
    visible_ends: torch.Tensor | None = None
    """``[T]`` int32: the position before which a token sees keys, at least its own + 1 and at most its row's ``seq_lens``.

    A window only limits earlier keys. None: every token sees up to itself. The step has it too.
    """
    out: torch.Tensor | None = None
    """``[T, num_heads, v_head_dim]`` contiguous, filled only at the planned rows' tokens; None: allocate."""
    unfinished: Unfinished | None = None
    """The projection of which q is a part, for a backend that ``finishes`` it; None: q and the cache are complete."""


class ReplayLengths(NamedTuple):
    """Rows of a captured step about to be replayed. Lengths are exact."""

    num_decode_rows: int
    end: int
    """One past the last token that the captured rows have room for."""
    query_start: np.ndarray
    """``[R + 1]``: row -> its first token in the packed batch."""
    seq_lens: np.ndarray
    """``[R]``; 0: a padding row, which may still have a query."""

    def split(self) -> tuple[ReplayLengths, ReplayLengths]:
        """Splits decode rows from prefill rows. Decode rows always have all the tokens they have room for."""
        border, starts = self.num_decode_rows, self.query_start
        decode = ReplayLengths(border, int(starts[border]), starts[: border + 1], self.seq_lens[:border])
        return decode, ReplayLengths(0, self.end, starts[border:], self.seq_lens[border:])


class Scratch:
    """Device memory that backends use in turn within a launch.

    An outgrown tensor stays allocated, because a captured graph may write to it.
    """

    def __init__(self) -> None:
        self._current: dict[str, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def take(self, use: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """Returns at least ``nbytes`` uint8, shared by all callers of the same ``use``."""
        tensor = self._current.get(use)
        if tensor is None or len(tensor) < nbytes:
            tensor = self._current[use] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.tensors.append(tensor)
        return tensor


class AttentionBackend(abc.ABC):
    """Computes attention over the paged cache. One instance serves all layers that chose it.

    Args:
        scratch: shared with the other backends of a composition; None: its own.
    """

    name: str
    modes: Modes = NO_MODES
    """Supported modes beyond dense causal attention."""
    kinds: frozenset[str] = frozenset()
    """Supported ``AttentionSpec.kinds``."""
    dtypes: tuple[str, ...] = ()
    """Supported dtypes of q and of the output; empty: any."""
    only_on_cpu: bool = False
    has_scales: bool = True
    """Can dequantise K and V of an FP8 KV cache."""
    capturable: bool = False
    """``run`` of a ``bounded`` step can be captured in a CUDA graph: then only the step's tensors count."""
    plans_replays: bool = False
    """``prepare_replay`` must be called before each replay."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.scratch = Scratch() if scratch is None else scratch
        self._planned: StepMetadata | None = None

    @classmethod
    def supports(
        cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None = None, modes: Modes = NO_MODES
    ) -> list[str]:
        """Reasons why this backend cannot run such a layer; empty: it can.

        Args:
            dtype: of q and of the output.
            kv_dtype: of the KV cache; None: as ``dtype``.
            modes: modes the layer needs.
        """
        reasons = [f"it has no mode {mode}" for mode in sorted(modes - cls.modes)]
        reasons += [f"it does not support a layer's {kind}" for kind in sorted(spec.kinds - cls.kinds)]
        if not cls.has_scales:
            reasons += scales_missing(kv_dtype)
        if cls.only_on_cpu and not device.startswith("cpu"):
            reasons.append(f"it runs on the CPU, not on {device}")
        if cls.dtypes and dtype not in cls.dtypes:
            reasons.append(f"it computes in {', '.join(cls.dtypes)}, not in {dtype}")
        return reasons + cls.refusals(spec, device, dtype, kv_dtype)

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        """Reasons of ``supports`` beyond what the class declares."""
        return []

    def plan(self, step: StepMetadata) -> None:
        """Called once a step, before its layers run.

        Raises:
            ValueError: the step needs a mode that this backend does not support.
        """
        if step.visible_ends is not None and VISIBLE_ENDS not in self.modes:
            raise ValueError(f"attention backend {self.name} has no mode {VISIBLE_ENDS}")
        self._planned = step

    @abc.abstractmethod
    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        """Computes attention of the planned step's tokens, whose K and V are in the cache already.

        Returns:
            ``[T, num_heads * v_head_dim]`` in q's dtype; a view of ``inputs.out`` if that is set.
        """

    def finishes(self, cache: LayerCache) -> bool:
        """Returns whether ``run`` takes ``AttentionInputs.unfinished`` of the planned step."""
        return False

    @property
    def graph_version(self) -> int:
        """Incremented when captured graphs are stale."""
        return 0

    def prepare_replay(self, lengths: ReplayLengths) -> None:  # noqa: B027
        """Updates what a captured step reads, before its replay, in the replay's stream."""

    def reserve(self, device: torch.device) -> None:  # noqa: B027
        """Allocates the workspace that all captured steps share, before memory is measured."""

    @property
    def workspaces(self) -> list[torch.Tensor]:
        """Tensors kept from step to step. Backends may share them."""
        return self.scratch.tensors

    @property
    def step(self) -> StepMetadata:
        """The planned step. Raises RuntimeError before ``plan``."""
        if self._planned is None:
            raise RuntimeError("plan() comes before run()")
        return self._planned


def workspace_bytes(backends: Iterable[AttentionBackend]) -> int:
    """Bytes of the backends' workspaces, each tensor counted once."""
    return sum({id(tensor): tensor.nbytes for backend in backends for tensor in backend.workspaces}.values())


def scales_missing(kv_dtype: str | None) -> list[str]:
    """The refusal of a backend that cannot dequantise K and V."""
    return ["it has no per-token-head scales, which an FP8 KV cache has"] if kv_dtype == FP8_KV else []


def distinct(backends: Iterable[AttentionBackend]) -> list[AttentionBackend]:
    """The distinct instances, which layers may share: those to plan in a step."""
    return list({id(backend): backend for backend in backends}.values())
