"""The contract between a foreign layer and headrace's attention: what it computes, and each way of breaking it."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.cache_config import cache_holding
from support.models.harness import model_spec

from headrace.attention.backend import StepMetadata
from headrace.attention.context import ForwardContext
from headrace.attention.select import create
from headrace.cache.planes import allocate
from headrace.model_spec import AttentionSpec, cache_groups
from headrace.models.fallback.contract import ContextCell, ForeignLayer, check_layer_numbers, finished_logits
from headrace.models.fallback.layout import MEGATRON, TRANSFORMERS, TRANSFORMERS_OUT, AxisLayout

HEADS, KV_HEADS, WIDTH, V_WIDTH = 6, 2, 8, 4
FLEET = AxisLayout("PaddleFleet", "bshd")
PACKED = AxisLayout("packed", "shd")
LAYOUTS = [TRANSFORMERS, TRANSFORMERS_OUT, MEGATRON, FLEET, PACKED]


def spec(layer: int = 0, **changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "layer": layer,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": WIDTH,
        "v_head_dim": V_WIDTH,
        "scale": 0.3,
    }
    return AttentionSpec(**fields | changes)


def context(layer: AttentionSpec, tokens: int) -> ForwardContext:
    """One prompt from its beginning, in a cache of its own."""
    layers = [dataclasses.replace(layer, layer=0, kv_source=None)] if layer.kv_source is None else [spec(0), layer]
    groups = cache_groups(layers, "float32")
    config = cache_holding([3], block_size=16, groups=groups, enable_prefix_caching=False, dtype="float32")
    caches = allocate(config, model_spec(layers), "cpu", "float32")
    starts = np.array([0, tokens], dtype=np.int32)
    positions = torch.arange(tokens)
    step = StepMetadata(
        num_decode_rows=0,
        query_start=torch.from_numpy(starts),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        slot_mapping=(16 + positions,),
        block_tables=(torch.tensor([[1]], dtype=torch.int32),),
        query_start_host=starts,
        seq_lens_host=starts[1:],
    )
    backend = create("reference")
    backend.plan(step)
    return ForwardContext(step, caches, [backend] * len(layers))


def qkv(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, HEADS, WIDTH), (tokens, KV_HEADS, WIDTH), (tokens, KV_HEADS, V_WIDTH))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    logits = scale * torch.einsum("qhd,khd->hqk", q, k)
    logits += torch.full((len(q), len(q)), -math.inf).triu(1)
    if sinks is not None:
        logits = torch.cat((logits, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(q)], v)


def layer(given: AxisLayout = PACKED, wanted: AxisLayout = PACKED, **changes: Any) -> tuple[ForeignLayer, ContextCell]:
    cell = ContextCell()
    return ForeignLayer(spec(**changes), cell, given, wanted), cell


@pytest.mark.parametrize("wanted", LAYOUTS, ids=lambda layout: layout.axes)
@pytest.mark.parametrize("given", LAYOUTS, ids=lambda layout: layout.axes)
def test_every_layout(given: AxisLayout, wanted: AxisLayout) -> None:
    q, k, v = qkv()
    foreign, cell = layer(given, wanted)
    with cell.holding(context(foreign.spec, 5)):
        out = foreign(*(given.unpack(x) for x in (q, k, v)))
    assert out.dim() == len(wanted.axes)
    torch.testing.assert_close(wanted.pack(out, "out", "here"), by_hand(q, k, v, 0.3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.axes)
def test_a_layout_says_where_its_axes_are(layout: AxisLayout) -> None:
    shape = [{"b": 1, "s": 5, "h": 3, "d": 2}[axis] for axis in layout.axes]
    assert layout.pack(torch.empty(shape), "q", "here").shape == (5, 3, 2)
    assert layout.unpack(torch.empty(5, 3, 2)).shape == torch.Size(shape)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("layout", [TRANSFORMERS, MEGATRON, FLEET], ids=lambda layout: layout.axes)
def test_a_batch_of_two_is_refused(layout: AxisLayout, argument: str) -> None:
    given = {name: layout.unpack(x) for name, x in zip("qkv", qkv(), strict=True)}
    given[argument] = torch.cat([given[argument]] * 2, dim=layout.axes.index("b"))
    foreign, cell = layer(layout)
    with cell.holding(context(foreign.spec, 5)), pytest.raises(ValueError, match=f"layer 0: {argument} has a batch of 2"):
        foreign(**given)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_an_unexpected_rank_is_refused(argument: str) -> None:
    given = dict(zip("qkv", qkv(), strict=True))
    given[argument] = given[argument].flatten(1)
    foreign, cell = layer()
    with cell.holding(context(foreign.spec, 5)), pytest.raises(ValueError, match=f"layer 0: {argument} has 2 dimensions"):
        foreign(**given)


@pytest.mark.parametrize("argument", ["k", "v"])
def test_a_missing_key_or_value_is_refused(argument: str) -> None:
    given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True)) | {argument: None}
    foreign, cell = layer()
    with cell.holding(context(foreign.spec, 5)), pytest.raises(ValueError, match=f"layer 0: {argument} is missing"):
        foreign(**given)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_heads_and_widths_that_are_not_the_specs(argument: str) -> None:
    """A library would give them that counts the heads of all its processes."""
    for dim in (1, 2):
        given = dict(zip("qkv", qkv(), strict=True))
        given[argument] = torch.cat([given[argument]] * 2, dim=dim)
        foreign, cell = layer()
        with cell.holding(context(foreign.spec, 5)), pytest.raises(ValueError, match=f"layer 0: {argument} has 5 tokens of"):
            foreign(**given)


def test_keys_of_other_tokens_are_refused() -> None:
    q, k, v = qkv()
    foreign, cell = layer()
    with cell.holding(context(foreign.spec, 5)), pytest.raises(ValueError, match="k has 4 tokens"):
        foreign(q, k[:4], v[:4])


def test_outside_a_step_the_context_is_missing() -> None:
    foreign, _ = layer()
    with pytest.raises(ValueError, match="layer 0: attention was called outside a step"):
        foreign(*qkv())


def test_the_context_goes_with_the_step_even_on_an_exception() -> None:
    foreign, cell = layer()
    q, k, v = qkv()
    with pytest.raises(ZeroDivisionError), cell.holding(context(foreign.spec, 5)):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="outside a step"):
        foreign(q, k, v)
    ctx = context(foreign.spec, 5)
    with cell.holding(ctx), pytest.raises(ValueError, match="computing a step already"), cell.holding(ctx):
        pass


def test_a_cell_belongs_to_one_model() -> None:
    mine, cell = layer()
    other, _ = layer()
    with cell.holding(context(mine.spec, 5)):
        mine(*qkv())
        with pytest.raises(ValueError, match="outside a step"):
            other(*qkv())


def test_sinks_come_with_the_call() -> None:
    q, k, v = qkv()
    foreign, cell = layer(sinks=True)
    sinks = torch.linspace(-1, 1, HEADS)
    with cell.holding(context(foreign.spec, 5)):
        torch.testing.assert_close(foreign(q, k, v, sinks.bfloat16()), by_hand(q, k, v, 0.3, sinks.bfloat16().float()))
        with pytest.raises(ValueError, match="sinks are missing"):
            foreign(q, k, v)
        with pytest.raises(ValueError, match=r"sinks has the shape \[5\]"):
            foreign(q, k, v, sinks[1:])
    plain, cell = layer()
    with cell.holding(context(plain.spec, 5)), pytest.raises(ValueError, match="sinks were not expected"):
        plain(q, k, v, sinks)


def test_a_layer_that_reads_anothers_kv_needs_none() -> None:
    q, k, v = qkv()
    cell = ContextCell()
    source, reader = (ForeignLayer(each, cell, PACKED, PACKED) for each in (spec(0), spec(1, kv_source=0)))
    with cell.holding(context(reader.spec, 5)):
        source(q, k, v)
        torch.testing.assert_close(reader(2 * q, None, None), by_hand(2 * q, k, v, 0.3))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_layer_numbers_of_any_base(first: int) -> None:
    check_layer_numbers([first, first + 1, first + 2])


@pytest.mark.parametrize("numbers", [[0, 2, 3], [1, 1, 2], [2, 1, 0], [0, 1, 2, 2], [1, 0]])
def test_wrong_layer_numbers_raise(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="layer numbers must be consecutive"):
        check_layer_numbers(numbers)


def test_no_layers_at_all() -> None:
    with pytest.raises(ValueError, match="no layer"):
        check_layer_numbers([])


def test_padded_columns_of_the_vocabulary() -> None:
    logits = torch.randn(3, 8, dtype=torch.bfloat16)
    out = finished_logits(logits, 6)
    assert out.dtype == torch.float32
    assert torch.equal(out[:, :6], logits[:, :6].float())
    assert bool((out[:, 6:] == -math.inf).all())
    assert torch.equal(finished_logits(logits, 8), logits.float())
    with pytest.raises(ValueError, match="8 columns for a vocabulary of 9"):
        finished_logits(logits, 9)


@pytest.mark.slow
def test_checks_hold_without_assertions() -> None:
    """``python -O`` strips ``assert``."""
    code = (
        "import torch\n"
        "from headrace.models.fallback.layout import TRANSFORMERS\n"
        "from headrace.models.fallback.contract import check_layer_numbers\n"
        "assert False\n"
        "batch = torch.empty(2, 1, 1, 1)\n"
        "for wrong in (lambda: TRANSFORMERS.pack(batch, 'q', 'layer 0'), lambda: check_layer_numbers([0, 2])):\n"
        "    try:\n"
        "        wrong()\n"
        "    except ValueError as error:\n"
        "        print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("refused") == 2
