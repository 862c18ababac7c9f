"""Two tensor-parallel processes, each with its part of every layer and an engine of its own, in step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import megatron
from support.models.megatron_engine import PROMPTS, assert_same, assert_same_every_way, eager, engine, tokens_of

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, RequestError

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")


def as_eager(rank: int) -> None:
    """The same modules with eager attention exchange what they need likewise."""
    model = megatron.gpt()
    llm = engine(model)
    assert [(layer.num_heads, layer.num_kv_heads) for layer in llm.info.layers] == [(2, 1)] * 3
    assert_same_every_way(llm, eager(model))


def one_kv_head_for_both(rank: int) -> None:
    """Both have it, and each its part of the queries."""
    model = megatron.gpt(num_query_groups=1)
    llm = engine(model)
    assert [(layer.num_heads, layer.num_kv_heads) for layer in llm.info.layers] == [(2, 1)] * 3
    assert_same_every_way(llm, eager(model))


def random_tokens_are_the_same(rank: int) -> None:
    llm = engine(megatron.gpt())
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, n=3)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    drawn = [list(sample.token_ids) for output in outputs for sample in output.outputs]
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, drawn)
    assert both[0] == both[1]


def weights_of_one_changed(rank: int) -> None:
    model = megatron.gpt()
    llm = engine(model)
    tokens_of(llm, PROMPTS[0])
    hits = llm.stats.prefix_hit_tokens
    if rank == 1:
        model.decoder.layers[0].self_attention.linear_qkv.weight.data.mul_(-1)
    tokens_of(llm, PROMPTS[0])
    assert llm.stats.prefix_hit_tokens == hits
    tokens_of(llm, PROMPTS[0])
    assert llm.stats.prefix_hit_tokens > hits


def updates_of_each_part(rank: int) -> None:
    """Each has its part of the new weights; what one refuses is written in neither."""
    model, other = megatron.gpt(), megatron.gpt(seed=1)
    llm = engine(model)
    name, norm = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"
    value = model.get_parameter(norm).detach().clone()
    whole = torch.zeros(model.get_parameter(name).shape[0] + rank, 32)
    with pytest.raises(ConfigError, match="has the shape" if rank else "was refused in another process"):
        llm.update_weights({norm: 2 * value, name: whole})
    assert torch.equal(model.get_parameter(norm), value)
    llm.update_weights(other.named_parameters())
    assert_same(llm, eager(other), PROMPTS[:1])


def parity_is_the_same_in_both(rank: int) -> None:
    for model in (megatron.gpt(num_query_groups=1), megatron.gpt(dtype=torch.bfloat16, bf16=True, std=0.1)):
        parity = engine(model).parity()
        assert parity.passed, parity
        both: list[Any] = [None, None]
        torch.distributed.all_gather_object(both, parity)
        assert both[0] == both[1]


def other_prompts_are_refused_in_both(rank: int) -> None:
    llm = engine(megatron.gpt())
    with pytest.raises(RequestError, match="must all be given the same prompts"):
        llm.generate({"prompt_token_ids": [4, 5, rank]}, SamplingParams(max_tokens=2))
    assert len(tokens_of(llm, [4, 5])) == 8


def other_arguments_are_refused_in_both(rank: int) -> None:
    with pytest.raises(ConfigError, match="the same arguments"):
        engine(megatron.gpt(), num_kv_blocks=20 + rank)


def memory_is_what_the_poorer_has(rank: int) -> None:
    from headrace.startup import environment

    probe = environment.probe
    environment.probe = lambda device: _with_memory(probe(device), (1 + rank) * 2**21)
    try:
        model = megatron.gpt()
        llm = LLM.from_megatron(model, block_size=4, max_model_len=64)
        sizes: list[Any] = [None, None]
        torch.distributed.all_gather_object(sizes, llm.info.num_blocks)
        assert sizes[0] == sizes[1]
    finally:
        environment.probe = probe


def _with_memory(facts: Any, nbytes: int) -> Any:
    import dataclasses

    return dataclasses.replace(facts, available_memory=nbytes)


CHECKS: list[Callable[[int], None]] = [
    as_eager,
    one_kv_head_for_both,
    random_tokens_are_the_same,
    weights_of_one_changed,
    updates_of_each_part,
    parity_is_the_same_in_both,
    other_prompts_are_refused_in_both,
    other_arguments_are_refused_in_both,
    memory_is_what_the_poorer_has,
]


def process(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for check in CHECKS:
        with megatron.no_device_asked_for():
            check(rank)
        Path(f"{folder}/{check.__name__}.{rank}").touch()
    torch.distributed.barrier()


@pytest.mark.slow
def test_two_processes_in_step(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=2)
    assert len(list(tmp_path.glob("*.[01]"))) == 2 * len(CHECKS)
