"""``LLM`` over replicas: real engines of a tiny model in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, EngineError, RequestError


def build(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", max_num_seqs=4, num_kv_blocks=200, num_threads=1, **args)


@pytest.mark.slow
def test_no_process_is_left(tiny_folder: Path) -> None:
    def started() -> set[psutil.Process]:
        return {*psutil.Process().children(recursive=True)} - before

    before: set[psutil.Process] = set()
    before = started()
    with build(tiny_folder, data_parallel_size=2) as llm:
        # A template is rendered in a fork of a process that is prepared for it.
        llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), chat_template="{{ messages[0].content }}")
        assert len(started()) == 4
    assert not started()


@pytest.mark.slow
def test_replicas_generate_what_one_engine_does(tiny_folder: Path) -> None:
    prompts = [f"prompt {number}" * (1 + number % 5) for number in range(24)]
    params = [SamplingParams(temperature=1.0, max_tokens=4 + number % 7, n=1 + number % 2) for number in range(24)]
    with build(tiny_folder) as one:
        expected = one.generate(prompts, params)
    with build(tiny_folder, data_parallel_size=2) as llm:
        results = llm.generate(prompts, params)
        assert [[s.token_ids for s in r.outputs] for r in results] == [[s.token_ids for s in r.outputs] for r in expected]
        assert [r.prompt for r in results] == prompts and all(r.finished and r.times is not None for r in results)
        replicas = llm._loaded.core._llm.replicas
        assert all(report.accepted > 0 for report in replicas.reported()), "how many each gets depends on the machine"
        assert sum(report.accepted for report in replicas.reported()) == 24
        assert llm.stats.generation_tokens == sum(len(s.token_ids) for r in results for s in r.outputs)
        with pytest.raises(RequestError, match="tokens"):
            llm.generate(["fine", "x" * 10_000])
        assert llm.generate("again", SamplingParams(max_tokens=1))[0].finished
        assert llm.reset_prefix_cache() is True
        llm.check_integrity()
        with pytest.raises(ConfigError) as refused:
            llm.update_weights({})
        assert refused.value.param == "data_parallel_size"
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x")
