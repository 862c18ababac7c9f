"""Sparse prompts on tensor-parallel ranks, as threads: each rank has its own heads, and all report those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.paw import CONFIG, tensors, write
from support.runner.harness import prompt
from support.thread_ranks import ThreadAgreement, on_engines, on_ranks

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.frontend.local import LocalEngine, open_local
from headrace.outputs import AttentionReport
from headrace.parallel.group import ThreadGroup
from headrace.sampling_params import SamplingParams
from headrace.startup.source import FileSource

RANKS = 3
LENGTHS = (450, 1000, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("paw"), tensors())


def args_of(folder: Path, **changes: Any) -> EngineArgs:
    values: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_kv_blocks": 200,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
    }
    return EngineArgs(**values | changes)


def served(engine: LocalEngine) -> list[tuple[list[int], list[float], AttentionReport | None]]:
    """Prompts side by side, the first of which is preempted, and the first one again, from the cache."""
    core, found = engine.core, {}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    for turn in range(2):
        for number, length in enumerate(LENGTHS if turn == 0 else LENGTHS[:1]):
            name = f"{turn}-{number}"
            core.add(engine.inputs.request({"prompt_token_ids": prompt(40 + number, length)}, params, request_id=name))
            found[name] = [[], [], None]
        preempted = turn > 0
        while core.has_work():
            for delta in core.step():
                one = found[delta.request_id]
                one[0] += delta.token_ids
                one[1] += [entry.logprobs[0] for entry in delta.logprobs or []]
                one[2] = delta.attention or one[2]
            first = next((seq for seq in core.scheduler._running if seq.request.request_id == "0-0"), None)
            if not preempted and first is not None and found["0-0"][0]:
                core.scheduler._preempt(first)
                preempted = True
        assert preempted
    core.scheduler.check_integrity()
    return [tuple(one) for one in found.values()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"elastic_max_exact_tokens": 256},
        *(
            {"sparse_prefill": selector, "sparse_min_tokens": 0, "sparse_threshold": threshold}
            for selector, threshold in (("xattn", 0.6), ("mean", 0.9))
        ),
    ],
    ids=["router", "segments", "xattn", "mean"],
)
def test_prompts_are_served_as_by_one_rank(changes: dict[str, Any], folder: Path) -> None:
    (expected,) = on_engines(args_of(folder, **changes), 1, served)
    densities = [report.density for _, _, report in expected if report is not None and report.computed]
    assert min(densities) < 1
    if "sparse_prefill" not in changes:
        kinds = {kind for layers in expected[0][2].head_types for layer in layers for kind in layer}
        assert kinds == {"xattn", "streaming"}
    for found in on_engines(args_of(folder, **changes), RANKS, served):
        for (tokens, logprobs, report), (wanted, theirs, whole) in zip(found, expected, strict=True):
            assert tokens == wanted and logprobs == pytest.approx(theirs, abs=1e-4)
            assert report is not None and whole is not None
            assert fields_of(report) == fields_of(whole)


def fields_of(report: AttentionReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


def test_ranks_with_the_same_kv_heads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def one(group: ThreadGroup) -> None:
        args = args_of(tmp_path, load_format="dummy", tensor_parallel_size=6)
        open_local(FileSource(args, ThreadAgreement(group), group))

    with pytest.raises(ConfigError, match="decides for each of 3 KV heads, and 6 ranks would hold the same ones"):
        on_ranks(6, one)
