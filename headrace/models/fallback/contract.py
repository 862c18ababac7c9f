"""The contract between a foreign model and headrace's attention.

A foreign layer's inner attention is an AttentionSpec and two layouts: that of q, k and v, and that of the result. Everything
else of the layer (norms, projections, rotary embedding, MLP) is the library's. Adapters: ``transformers.py``, ``megatron.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from headrace.attention.backend import AttentionInputs
from headrace.attention.context import ForwardContext
from headrace.cache.planes import write
from headrace.model_spec import AttentionSpec
from headrace.models.fallback.layout import AxisLayout
from headrace.models.interface import ModelInputs


class ContextCell:
    """Holds the forward context of the step that a foreign model computes.

    The signatures of its modules have no argument for it, so each attention layer holds the cell of its model.
    """

    def __init__(self) -> None:
        self._context: ForwardContext | None = None

    @contextlib.contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        """Sets the context inside the block, and clears it afterwards, also on an exception.

        Raises:
            ValueError: the model is already computing a step.
        """
        if self._context is not None:
            raise ValueError("the model is computing a step already: its context cell holds one step at a time")
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def context(self, where: str) -> ForwardContext:
        """Returns the context. Raises ValueError outside a step. ``where``: the caller, for the error."""
        if self._context is None:
            raise ValueError(f"{where}: attention was called outside a step: the forward context is missing")
        return self._context


class ForeignLayer:
    """The inner attention of one foreign layer.

    q and k come rotated, so the spec says ``rotary_dim=0``; the scale is the spec's and never changes.

    Args:
        spec: the layer's geometry, with the heads of this process alone under tensor parallelism.
        cell: the cell of the layer's model.
        input_layout: of q, k and v.
        output_layout: of the result.
    """

    def __init__(self, spec: AttentionSpec, cell: ContextCell, input_layout: AxisLayout, output_layout: AxisLayout) -> None:
        self.spec = spec
        self._cell = cell
        self._input_layout = input_layout
        self._output_layout = output_layout
        self._where = f"layer {spec.layer}"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes attention over the step's packed tokens and the cached KV of their sequences.

        Args:
            q: num_heads heads of width head_dim, in ``input_layout``.
            k: num_kv_heads heads of width head_dim; None, as v may be, if the layer reads another layer's KV.
            v: num_kv_heads heads of width v_head_dim.
            sinks: ``[num_heads]`` logits, for layers that have them.

        Returns:
            num_heads heads of width v_head_dim, in ``output_layout``.

        Raises:
            ValueError: an argument is missing or its shape is not the spec's, or there is no step.
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
        inputs = AttentionInputs(packed_q, cache, sinks, context.step.visible_ends)
        out = context.backends[spec.layer].run(inputs)
        return self._output_layout.unpack(out.view(-1, spec.num_heads, spec.v_head_dim))

    def _packed(
        self, argument: str, tensor: torch.Tensor | None, heads: int, width: int, tokens: int | None = None
    ) -> torch.Tensor:
        if tensor is None:
            raise ValueError(f"{self._where}: {argument} is missing")
        packed = self._input_layout.pack(tensor, argument, self._where)
        expected = (len(packed) if tokens is None else tokens, heads, width)
        if packed.shape != expected:
            raise ValueError(
                f"{self._where}: {argument} has {packed.shape[0]} tokens of {packed.shape[1]} heads of width "
                f"{packed.shape[2]}, but the layer has {expected[0]} tokens of {heads} heads of width {width}"
            )
        return packed


def check_layer_numbers(numbers: Sequence[int]) -> None:
    """Checks that a library's own layer numbers, in the order in which the layers run, are consecutive from any base.

    Raises:
        ValueError: there are no layers; a number is missing or repeated, or the layers do not run in their order.
    """
    if not numbers:
        raise ValueError("the model has no layer with an attention to replace")
    for index, number in enumerate(numbers):
        if number != numbers[0] + index:
            raise ValueError(
                f"layer numbers must be consecutive in the order in which the layers run: place {index} has number {number}, "
                f"not {numbers[0] + index}; all of them are {list(numbers)}"
            )


def check_inputs(inputs: ModelInputs) -> None:
    """Refuses inputs that only native decoders take.

    Raises:
        ValueError: names the input.
    """
    for name in ("rope_positions", "extras"):
        if getattr(inputs, name) is not None:
            raise ValueError(f"{name}: the layers are another library's, and take token ids or inputs_embeds, and positions")


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Computes causal attention over one whole sequence by the formula, as a reference.

    Args:
        q, k, v: ``[T, heads, width]`` each.
        sinks: ``[num_heads]`` logits of keys that have no value.

    Returns:
        ``[T, num_heads, v_head_dim]`` float32.
    """
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
    logits = spec.scale * q @ k.transpose(1, 2)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    places = torch.arange(q.shape[1], device=q.device)
    hidden = places[None] > places[:, None]
    if window is not None:
        hidden |= places[None] <= places[:, None] - window
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().view(-1, 1, 1).expand(-1, q.shape[1], 1)), dim=-1)
    return (logits.softmax(-1)[..., : q.shape[1]] @ v).transpose(0, 1)


def finished_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Converts logits for the sampler: float32, -inf in padded columns of the vocabulary.

    Args:
        logits: ``[N, width]``
        vocab_size: number of tokens; further columns are padding.

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
