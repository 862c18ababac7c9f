"""Engines of several ranks serve, for every family, under random traffic the tokens that one rank serves. Float32."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest
from support.models import hybrids, indexed
from support.models.cases import CASES, SMALL
from support.thread_ranks import on_engines
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.config import EngineArgs
from headrace.frontend.local import LocalEngine, open_local
from headrace.models import registry
from headrace.parallel.layout import workable_sizes
from headrace.sampling_params import SamplingParams
from headrace.startup.source import FileSource

pytestmark = pytest.mark.slow
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
REFUSED = ("llama-head-dim",)
"""3 KV heads."""
TEXT = [name for name in CASES if name not in REFUSED and not any(word in name for word in ("vl", "images", "uneven"))]
PROCESSES = ["llama", "mistral-window", "qwen3", "gemma3", "mimo", "gpt-oss", "qwen3-moe", "deepseek-v2", "qwen3.5-moe"]
"""Also run as processes over gloo: each kind of layer once."""
HYBRIDS = (
    *("qwen3-next-uneven", "qwen3.5", "qwen3.5-moe", "nemotron-h-experts", "granite-moe", "lfm2", "lfm2-moe", "kimi-linear"),
    *("olmo-hybrid", "bamba", "falcon-h1-norm", "minimax", "v3.2", "axk2", "glm-dsa", "minimax-m3", "dots3"),
)
"""Each family that has states, and each that has indexers."""
Tokens = dict[tuple[str, int], list[int]]


def write_hybrid(folder: Path, name: str) -> None:
    kind, values = (hybrids.CASES | indexed.CASES)[name]
    config = CONFIG_MAPPING[kind](**values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(folder)


def write(folder: Path, name: str) -> list[int]:
    """The family's config; returns the numbers of ranks to compare."""
    _, config_class, changes = CASES[name]
    heads = HEADS if "num_attention_heads" not in changes else {}
    config = config_class(**{**SMALL, **heads, **changes})
    config.architectures = [CASES[name][0].__name__]
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    spec = registry.model_spec(config)
    return [size for size in (2, 4) if size in workable_sizes(spec)]


def args_of(folder: Path, **changes: Any) -> EngineArgs:
    values: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "num_threads": 1,
        "num_kv_blocks": 20,
        "block_size": 8,
        "max_model_len": 80,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
    }
    return EngineArgs(**values | changes)


def served(engine: LocalEngine, beginning: int = 24) -> Tokens:
    """Prompts that share beginnings come while others run; one is aborted."""
    chance, core, found = random.Random(1), engine.core, Tokens()
    prefix = [chance.randrange(engine.info.vocab_size) for _ in range(beginning)]
    waiting = []
    for number in range(10):
        prompt = prefix[: chance.choice((0, 2 * beginning // 3, beginning))] + [
            chance.randrange(engine.info.vocab_size) for _ in range(9)
        ]
        greedy: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number, "top_p": 0.9}
        params = SamplingParams(**greedy, max_tokens=chance.randint(4, 20), ignore_eos=True, detokenize=False)
        waiting.append((f"r{number}", {"prompt_token_ids": prompt}, params))
    while waiting or core.has_work():
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            name, prompt, params = waiting.pop(0)
            core.add(engine.inputs.request(prompt, params, request_id=name))
        for delta in core.step():
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if len(waiting) == 4:
            core.abort("r3")
    core.check_integrity()
    assert beginning == 24 or core.scheduler.stats().prefix_hit_tokens
    core.close()
    return found


served_long = functools.partial(served, beginning=130)


@pytest.mark.parametrize("name", TEXT)
def test_ranks_serve_what_one_serves(name: str, tmp_path: Path) -> None:
    sizes = write(tmp_path, name)
    assert sizes, "no number of ranks is compared"
    (expected,) = on_engines(args_of(tmp_path), 1, served)
    assert len(expected) >= 9 and len({token for tokens in expected.values() for token in tokens}) > 5
    for size in sizes:
        for rank, found in enumerate(on_engines(args_of(tmp_path), size, served)):
            assert found == expected, f"rank {rank} of {size}"


@pytest.mark.parametrize("name", [name for name in PROCESSES if name not in HYBRIDS])
def test_processes_serve_what_one_serves(name: str, tmp_path: Path) -> None:
    sizes = write(tmp_path, name)
    (expected,) = on_engines(args_of(tmp_path), 1, served)
    for size in sizes:
        assert served(open_local(FileSource(args_of(tmp_path, tensor_parallel_size=size)))) == expected, f"{size} ranks"


@pytest.mark.parametrize("name", HYBRIDS)
def test_ranks_serve_what_one_serves_of_hybrids(name: str, tmp_path: Path) -> None:
    """Prompts find each other's states on every rank alike."""
    write_hybrid(tmp_path, name)
    args = args_of(tmp_path, max_model_len=192, max_num_batched_tokens=80, num_kv_blocks=None, kv_cache_memory=2 << 20)
    (expected,) = on_engines(args, 1, served_long)
    assert len(expected) >= 9 and len({token for tokens in expected.values() for token in tokens}) > 5
    if name in PROCESSES:
        assert served_long(open_local(FileSource(dataclasses.replace(args, tensor_parallel_size=2)))) == expected
    for rank, found in enumerate(on_engines(args, 2, served_long)):
        assert found == expected, f"rank {rank}"
