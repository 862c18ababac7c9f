"""The contract between a foreign model and headrace's attention.

A foreign layer's inner attention is an AttentionSpec and two layouts: how the library hands over q, k and v, and how it
wants the result. Everything else of the layer (norms, projections, rotary embedding, MLP) is the library's. What a library
needs beyond this is an adapter: transformers in ``transformers.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from headrace.attention.context import ForwardContext
from headrace.cache.planes import write
from headrace.models.fallback.layout import Layout
from headrace.spec import AttentionSpec


class ContextCell:
    """The step that a foreign model is computing.

    Its modules cannot be handed the forward context, their signatures being what they are: each of them holds the cell of
    the model that it belongs to.
    """

    def __init__(self) -> None:
        self._context: ForwardContext | None = None

    @contextlib.contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        """The context is there inside, and gone afterwards, whatever happens.

        Raises:
            ValueError: the model is in the middle of a step already.
        """
        if self._context is not None:
            raise ValueError("the model is computing a step already: its context cell holds one step at a time")
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def context(self, where: str) -> ForwardContext:
        """Raises ValueError outside a step. ``where``: who asks, for the error."""
        if self._context is None:
            raise ValueError(f"{where}: attention was called outside a step: the forward context is missing")
        return self._context


class ForeignLayer:
    """The inner attention of one foreign layer.

    q and k come rotated, so the spec says ``rotary_dim=0``; the scale is the spec's and never changes.

    Args:
        spec: the layer's geometry, heads counted for this process alone where the library shares them among several.
        cell: of the model that the layer belongs to.
        given: the layout of q, k and v.
        wanted: the layout of the result.

    Raises:
        ValueError: the spec would rotate q and k a second time.
    """

    def __init__(self, spec: AttentionSpec, cell: ContextCell, given: Layout, wanted: Layout) -> None:
        if spec.rotary_dim:
            raise ValueError(
                f"layer {spec.layer}: rotary_dim is {spec.rotary_dim}, but a foreign model has rotated q and k already: "
                "it must be 0"
            )
        self.spec = spec
        self._cell = cell
        self._given = given
        self._wanted = wanted
        self._where = f"layer {spec.layer}"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the step's packed tokens and what the cache holds of their sequences.

        Args:
            q: num_heads heads of width head_dim, in the layout ``given``.
            k: num_kv_heads heads of width head_dim; it may be None, as v, where the layer reads another's KV.
            v: num_kv_heads heads of width v_head_dim.
            sinks: ``[num_heads]`` logits, for layers that have them.

        Returns:
            num_heads heads of width v_head_dim, in the layout ``wanted``.

        Raises:
            ValueError: an argument is missing, or of a shape that is not the spec's; or there is no step.
        """
        spec = self.spec
        context = self._cell.context(self._where)
        packed_q = self._packed("q", q, spec.num_heads, spec.head_dim)
        cache = context.caches[spec.layer]
        if spec.kv_source is None:
            packed_k = self._packed("k", k, spec.num_kv_heads, spec.head_dim, len(packed_q))
            packed_v = self._packed("v", v, spec.num_kv_heads, spec.v_head_dim, len(packed_q))
            write(cache, packed_k, packed_v, context.step.slot_mapping[cache.group])
        if spec.sinks != (sinks is not None):
            raise ValueError(f"{self._where}: sinks {'are missing' if spec.sinks else 'were not expected'}")
        if sinks is not None:
            if sinks.numel() != spec.num_heads:
                raise ValueError(f"{self._where}: sinks has the shape {list(sinks.shape)}, not [{spec.num_heads}]")
            sinks = sinks.flatten().float()
        out = context.backends[spec.layer].run(packed_q, cache, sinks)
        return self._wanted.unpack(out.view(-1, spec.num_heads, spec.v_head_dim))

    def _packed(
        self, argument: str, tensor: torch.Tensor | None, heads: int, width: int, tokens: int | None = None
    ) -> torch.Tensor:
        if tensor is None:
            raise ValueError(f"{self._where}: {argument} is missing")
        packed = self._given.pack(tensor, argument, self._where)
        expected = (len(packed) if tokens is None else tokens, heads, width)
        if packed.shape != expected:
            raise ValueError(
                f"{self._where}: {argument} has {packed.shape[0]} tokens of {packed.shape[1]} heads of width "
                f"{packed.shape[2]}, but the layer has {expected[0]} tokens of {heads} heads of width {width}"
            )
        return packed


def layer_ids(numbers: Sequence[int]) -> list[int]:
    """The layers 0 to N - 1 in the order of a library's own numbers, whatever they start from.

    Args:
        numbers: the library's number of each layer, in the order in which the layers run.

    Returns:
        ``0 .. N - 1``: position i is what the layer with ``numbers[i]`` is called here, and its place in the cache.

    Raises:
        ValueError: there are no layers; or the numbers are not consecutive and ascending: one is missing, twice there, or
            the layers do not run in their order.
    """
    if not numbers:
        raise ValueError("the model has no layer with an attention to replace")
    first = numbers[0]
    for index, number in enumerate(numbers):
        if number != first + index:
            raise ValueError(
                f"layer numbers must be consecutive in the order in which the layers run: place {index} has number {number}, "
                f"not {first + index}; all of them are {list(numbers)}"
            )
    return list(range(len(numbers)))


def check_layers(specs: Sequence[AttentionSpec], num_caches: int) -> None:
    """Every layer has a cache entry of its own: ids are 0 to N - 1, each once, in order.

    Raises:
        ValueError: they are not, or there are more or fewer cache entries than layers.
    """
    ids = [spec.layer for spec in specs]
    if ids != list(range(len(specs))):
        raise ValueError(f"layer ids must be 0 to {len(specs) - 1}, each once and in order, not {ids}")
    if num_caches != len(specs):
        raise ValueError(f"{len(specs)} layers have {num_caches} entries in the cache: there must be one each")


def finished_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits as the sampler takes them: float32, and -inf where the vocabulary was padded.

    Args:
        logits: ``[N, width]``
        vocab_size: tokens that there are; columns beyond it are padding.

    Raises:
        ValueError: there are fewer columns than tokens.
    """
    width = logits.shape[-1]
    if width < vocab_size:
        raise ValueError(f"logits has {width} columns for a vocabulary of {vocab_size}")
    out = logits.float()
    if width > vocab_size:
        padding = torch.arange(width, device=out.device) >= vocab_size
        out = out.masked_fill(padding, -torch.inf)
    return out
