"""Experts of random codes, and what they compute in float64."""

from __future__ import annotations

import dataclasses

import torch

from headrace.kernels.moe import reference
from headrace.kernels.moe.codes import X_GROUP, ExpertCodes, pack_words
from headrace.model_spec import MoeSpec


@dataclasses.dataclass(frozen=True)
class Case:
    """A number format. ``group``: outputs and inputs that share a scale, 0 for all inputs."""

    codec: str
    group: tuple[int, int]
    rounded: str = "none"
    """Rounding of activations: none, token, group or static."""
    zeros: bool = False
    minima: bool = False
    ordered: bool = False
    """Groups are not of neighbours."""
    scale: torch.dtype = torch.float32


CASES = {
    "fp8-channel": Case("e4m3", (1, 0), "token"),
    "fp8-blocks": Case("e4m3", (128, 128), "group"),
    "fp8-half-blocks": Case("e4m3", (64, 64), "group"),
    "fp8-rows": Case("e4m3", (1, 128), "group"),
    "fp8-weights": Case("e4m3", (128, 128)),
    "mxfp4": Case("mxfp4", (1, 32)),
    "int4-32": Case("int4", (1, 32), scale=torch.float16),
    "int4-64": Case("int4", (1, 64), zeros=True),
    "int4-128": Case("int4", (1, 128), zeros=True, scale=torch.float16),
    "int4-all": Case("int4", (1, 0)),
    "int4-minima": Case("int4", (1, 32), minima=True),
    "int4-minima-16": Case("int4", (1, 16), minima=True, scale=torch.float16),
    "int4-48": Case("int4", (1, 48), ordered=True),
    "int8-32": Case("int8", (1, 32), scale=torch.float16),
    "int8-128": Case("int8", (1, 128), minima=True, ordered=True),
    "int8-16": Case("int8", (1, 16)),
    "int8-all": Case("int8", (1, 0)),
    "int8-minima-all": Case("int8", (1, 0), minima=True),
    "w4afp8": Case("int4", (1, 128), "static", scale=torch.bfloat16),
    "w4afp8-token": Case("int4", (1, 128), "token"),
}


def random_codes(case: Case, count: int, outputs: int, inputs: int) -> ExpertCodes:
    """Weights of the size of ``inputs ** -0.5``."""
    group = (case.group[0], case.group[1] or inputs)
    grid = (count, -(-inputs // group[1]), outputs // group[0])
    size = inputs**-0.5
    offsets = None
    if case.codec == "e4m3":
        codes = (torch.randn(count, outputs, inputs) * 60).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = size / 60 * (0.5 + torch.rand(grid))
    else:
        bits = 8 if case.codec == "int8" else 4
        codes = pack_words(torch.randint(0, 2**bits, (count, outputs, inputs), dtype=torch.uint8), bits)
        scales = size / (5 if bits == 4 else 75) * (0.5 + torch.rand(grid)).to(case.scale)
        if case.codec == "mxfp4":
            scales = (127 + torch.randint(-3, 3, grid) - int(inputs**0.5).bit_length()).to(torch.uint8)
        if case.zeros:
            offsets = torch.randint(-8, 8, grid).to(torch.int8)
        if case.minima:
            offsets = -(2 ** (bits - 1)) * scales.float() * (0.5 + torch.rand(grid))
    order = torch.stack([torch.randperm(inputs) for _ in range(count)]).int() if case.ordered else None
    x_group = {"none": None, "token": inputs, "group": X_GROUP, "static": inputs}[case.rounded]
    x_scale = torch.tensor([0.02]) if case.rounded == "static" else None
    shape = count, outputs, inputs
    return ExpertCodes(case.codec, shape, codes, scales, group, offsets, x_group, x_scale, order)


def moved(codes: ExpertCodes, device: torch.device) -> ExpertCodes:
    tensors = {name: value.to(device) for name, value in vars(codes).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(codes, **tensors)


def exact(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    spec: MoeSpec,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Every choice by itself, products in float64, rounded where the kernels round."""
    out = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for token in range(len(x)):
        for choice in range(spec.top_k):
            expert = int(experts[token, choice])
            row = _product(x[token : token + 1], gate_up, expert, biases[0])
            row = _product(reference.gated(row, spec), down, expert, biases[1])
            out[token] += (row.double() * weights[token, choice].double()).to(x.dtype)[0].double()
    return out


def _product(x: torch.Tensor, codes: ExpertCodes, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
    y = codes.round_rows(x).double() @ codes.dequantize(expert).double().t()
    return (y if bias is None else y + bias[expert].double()).to(x.dtype)
