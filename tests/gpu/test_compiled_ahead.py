"""A start that compiles kernels ahead, on steps whose kernels are not launched, leaves an engine as one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runner.harness import prompt, request

from headrace.startup import known, loader

from .conftest import needs_cuda
from .driver import driving
from .test_invariants import arguments
from .tiny import FAMILIES, write_family

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes that the formats of packed weights hold."""
KINDS = ("llama", "sinks, 48 and 32 wide", "mixture", "mla", "latent, full width", "delta rule", "state space")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{family: (FAMILIES[family], {}) for family in KINDS},
    **{
        f"{family} in {quantization}": (FAMILIES[family] | WIDE, {"quantization": quantization})
        for family in ("llama", "mixture")
        for quantization in ("fp8", "int4")
    },
    "llama with adapters": (FAMILIES["llama"] | WIDE, {"enable_lora": True, "max_loras": 2}),
    "KV in FP8": (FAMILIES["llama"], {"kv_cache_dtype": "fp8_e4m3"}),
}
REQUESTS = [
    request(f"{length}", prompt(length, length), temperature=float(length % 2), max_tokens=12, ignore_eos=True)
    for length in (1, 9, 17, 33, 60)
]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.captures
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_a_start_without(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, options = CASES[case]
    folder = write_family(tmp_path / "model", **changes)
    args = arguments(folder, "cuda", "bfloat16", attention_backend="triton", graph_capture_seconds=0.0, **options)

    def answers(cache: str) -> tuple[dict[str, list[list[int]]], list[str]]:
        # Without the profile of an earlier start, which would measure nothing.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        with driving(args) as driver:
            driver.add(*REQUESTS)
            samples = driver.run()
            assert not any(sample.error for each in samples.values() for sample in each)
            tokens = {name: [sample.token_ids for sample in each] for name, each in samples.items()}
            return tokens, [phase.name for phase in driver.info.timeline]

    ahead, phases = answers("ahead")
    assert "kernels" in phases
    for module in (known, loader):
        monkeypatch.setattr(module, "dry_run", lambda *given: None)
    plain, phases = answers("plain")
    assert "kernels" not in phases and ahead == plain
