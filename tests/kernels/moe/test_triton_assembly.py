"""The instructions that decode integers, carried out one by one."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from headrace.kernels.moe.triton_codecs import CODECS, _affine_assembler


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def bits_of(value: object) -> int:
    return int(np.float32(value).view(np.uint32))


def run(code: str, operands: list[int], dtype: torch.dtype) -> list[float]:
    """Carries out PTX on 32-bit registers and returns the two floats of operand 0."""
    held = {f"${index}": value for index, value in enumerate([0, *operands])}

    def value(name: str) -> int:
        if name.startswith("0f"):
            return int(name[2:], 16)
        return held[name] if name in held else int(name, 0)

    for line in code.strip("{} ").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        operation, target, *names = re.split(r"[ ,]+", line)
        given = [value(name) for name in names]
        floats = [float_of(one) for one in given]
        if operation == "mov.b32":
            result = given[0]
        elif operation == "shr.b32":
            result = given[0] >> given[1]
        elif operation == "shl.b32":
            result = given[0] << given[1]
        elif operation == "and.b32":
            result = given[0] & given[1]
        elif operation == "lop3.b32":
            assert given[3] == 0xEA
            result = (given[0] & given[1]) | given[2]
        elif operation == "prmt.b32":
            both = [one >> 8 * byte & 255 for one in given[:2] for byte in range(4)]
            result = sum(both[given[2] >> 4 * place & 15] << 8 * place for place in range(4))
        elif operation == "add.rn.f32":
            result = bits_of(floats[0] + floats[1])
        elif operation == "mul.rn.f32":
            result = bits_of(floats[0] * floats[1])
        elif operation == "fma.rn.f32":
            result = bits_of(np.float64(floats[0]) * np.float64(floats[1]) + np.float64(floats[2]))
        else:
            assert operation == f"cvt.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}.f32"
            upper, lower = (torch.tensor(float(one)).to(dtype).view(torch.int16).item() & 0xFFFF for one in floats)
            result = upper << 16 | lower
        held[target] = result & 0xFFFFFFFF
    halves = [held["$0"] >> shift & 0xFFFF for shift in (0, 16)]
    return torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["symmetric", "scaled", "minima"])
@pytest.mark.parametrize("codec", ["int4", "int8"])
def test_every_code_in_every_place(codec: str, form: str, dtype: torch.dtype) -> None:
    bits = 4 if codec == "int4" else 8
    scales, minima = (np.float32(0.0137), np.float32(-0.0052)), (np.float32(-0.11), np.float32(0.07))
    rng = np.random.default_rng(0)
    for place in range(4):
        code = _affine_assembler(place, CODECS[codec], dtype == torch.bfloat16, form == "scaled", form == "minima")
        text = str(getattr(code, "value", code))
        for low in range(0, 2**bits, 1 if bits == 4 else 5):
            pair = low, 2**bits - 1 - low
            # What is in the other places must not matter.
            words = [
                int(rng.integers(0, 2 ** (4 * bits))) & ~((2**bits - 1) << bits * place) | one << bits * place for one in pair
            ]
            operands = words if bits == 8 else [words[0] | words[1] << 16]
            if form != "symmetric":
                operands = [*operands, *(bits_of(one) for one in scales)]
            if form == "minima":
                operands = [*operands, *(bits_of(one) for one in minima)]
                exact = [
                    float(one) * float(scale) + float(least) for one, scale, least in zip(pair, scales, minima, strict=True)
                ]
            else:
                factors = scales if form == "scaled" else (1.0, 1.0)
                exact = [(one - 2 ** (bits - 1)) * float(scale) for one, scale in zip(pair, factors, strict=True)]
            expected = torch.tensor(exact, dtype=torch.float32).to(dtype).tolist()
            assert run(text, operands, dtype) == pytest.approx(expected, rel=2.0**-11, abs=1e-9)
