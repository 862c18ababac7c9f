"""Models with indexers say what transformers says, token for token, however their prompts are cut and beside whatever runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from support.models.cases import greedy, prompt
from support.models.harness import Bench, copy_weights
from support.models.indexed import CASES, LIGHTNING, M3, pair
from transformers import CONFIG_MAPPING

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, ContradictionError
from headrace.model_spec import IndexerSpec, ModelSpec, layer_kv
from headrace.models import registry
from headrace.parallel.shards import shard_attention

from .equality import check_company, check_greedy, close

STEPS = 10
LENGTHS = (1, 30, 70)
KINDS = ("glm-dsa", "minimax-m3")
"""Tokens for all heads, and blocks for some of them."""
ALIKE = ("minimax-m3-local", "minimax-m3-pictures")
"""Cases like others here, but for a number or the parts beside the text."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in CASES])
def test_greedy_equals_transformers(name: str) -> None:
    theirs, ours = pair(name)
    tokens = check_greedy(theirs, Bench(ours, num_blocks=160), LENGTHS, STEPS)
    assert len({token for sequence in tokens for token in sequence}) >= STEPS


@pytest.mark.parametrize("name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_chunks_copies_preemption_and_company_change_nothing(name: str) -> None:
    """Four sequences in one cache: in chunks beside others, from another's blocks, and taken away and resumed."""
    _, ours = pair(name)
    check_company(ours, padding=True)


def within_reach(spec: ModelSpec, top_k: int) -> ModelSpec:
    layers = (
        layer if layer.indexer is None else dataclasses.replace(layer, indexer=dataclasses.replace(layer.indexer, top_k=top_k))
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("name", ["v3.2", "minimax-m3"])
def test_a_choice_matters_beyond_its_reach_alone(name: str) -> None:
    theirs, ours = pair(name)
    wide = registry.build(within_reach(ours.spec, 100), "float32", "cpu")
    copy_weights(wide, theirs.state_dict())
    found = []
    for model in (ours, wide):
        bench = Bench(model)
        found.append(bench.prefill(bench.sequence(prompt(60))))
    indexer = next(layer.indexer for layer in ours.spec.layers if layer.indexer is not None)
    close(found[0][: indexer.reach], found[1][: indexer.reach])
    assert (found[0][40:] - found[1][40:]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("name", [name if name == "glm-dsa" else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_engine_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    """From a saved checkpoint: in chunks, from cached prefixes, as two samples, in so few blocks that rows are preempted."""
    theirs, ours = pair(name)
    theirs.save_pretrained(tmp_path)
    block = 16 * sum(layer_kv(layer, "float32").bytes_per_token for layer in ours.spec.layers)
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32, "num_threads": 1}
    llm = LLM(str(tmp_path), kv_cache_memory=14 * block, skip_tokenizer_init=True, **options)
    assert [line.indexer != "" for line in llm.info.layers] == [layer.indexer is not None for layer in ours.spec.layers]
    sampling = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, n=2)
    long = prompt(60)
    # Of what windows saw, so few blocks keep nothing.
    found = 0 if any(layer.window for layer in ours.spec.layers) else 48
    for prompts, cached in (([prompt(13), long, prompt(50)], [0, 0, 0]), ([[*long, 5, 6]], [found])):
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling)
        for tokens, output, hit in zip(prompts, outputs, cached, strict=True):
            wanted = greedy(theirs, tokens, 14)[0]
            assert [list(sample.token_ids) for sample in output.outputs] == [wanted, wanted]
            assert output.num_cached_tokens >= hit
    assert llm.stats.num_preemptions > 0
    llm.check_integrity()
    llm.close()


def published(name: str) -> str:
    """The published checkpoint's name of a tensor of M3, which is that of a part of a larger model."""
    name = re.sub(r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score", name)
    name = re.sub(r"\.mlp\.(gate|shared_experts|experts)\.", r".block_sparse_moe.\1.", name)
    return "language_model." + re.sub(r"\.indexer\.", ".index_", name)


def test_a_published_checkpoint_of_m3() -> None:
    theirs, ours = pair("minimax-m3")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        name = published(name)
        if ".experts." in name:
            here = name.rpartition(".")[0]
            for expert, weight in enumerate(tensor):
                parts = zip(("w1", "w3"), weight.chunk(2), strict=True) if "gate_up" in name else [("w2", weight)]
                stored |= {f"{here}.{expert}.{part}.weight": one for part, one in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
            stored |= {name.replace("gate_up_proj", part): one for part, one in parts}
        else:
            stored[name] = tensor
    stored |= {"vision_tower.x": torch.zeros(1), "language_model.model.mtp.layers.0.x": torch.zeros(1)}
    again = registry.build(ours.spec, "float32", "cpu")
    copy_weights(again, stored)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), ours.parameters(), strict=True))


def test_a_checkpoint_of_dots3_with_pictures_and_sound_is_read_as_text() -> None:
    theirs, ours = pair("dots3")
    kind, values = CASES["dots3"]
    beside = {"adapter_out_dim": values["hidden_size"]}
    whole = CONFIG_MAPPING[kind.removesuffix("_text")](text_config=values, vision_config=beside, audio_config=beside)
    again = registry.build(registry.model_spec(whole), "float32", "cpu")
    assert again.spec.layers == ours.spec.layers and again.spec.mlps == ours.spec.mlps
    stored = {name.replace("model.", "model.language_model."): tensor for name, tensor in theirs.state_dict().items()}
    others = ("vision_encoder.x", "model.audio_tower.x", "model.language_model.layers.3.x", "model.mtp.x")
    copy_weights(again, stored | dict.fromkeys(others, torch.zeros(1)))
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "values", "error", "words"),
    [
        ("glm_moe_dsa", LIGHTNING | {"indexer_types": ["shared", "full", "full"]}, ContradictionError, "no indexer before it"),
        ("glm_moe_dsa", LIGHTNING | {"indexer_types": ["full", "half", "full"]}, ConfigError, "layer 1: indexer_types 'half'"),
        ("deepseek_v32", LIGHTNING | {"index_head_dim": 6}, ContradictionError, "index_head_dim 6"),
        ("minimax_m3_vl_text", M3 | {"index_local_blocks": 5}, ContradictionError, "index_local_blocks 5"),
        ("minimax_m3_vl_text", M3 | {"index_head_dim": 8}, ContradictionError, "index_head_dim 8"),
        ("minimax_m3_vl_text", M3 | {"index_n_heads": 3}, ContradictionError, "shared evenly by 3 index heads"),
    ],
)
def test_contradictions_name_the_field(kind: str, values: dict, error: type[ConfigError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        registry.model_spec(CONFIG_MAPPING[kind](**values))


def test_index_keys_are_kept_once_a_layer_and_never_in_fp8() -> None:
    _, ours = pair("glm-dsa")
    full, shared, _ = ours.spec.layers
    assert [plane.name for plane in layer_kv(full, "float32").planes] == ["mla", "index"]
    assert [plane.name for plane in layer_kv(shared, "float32").planes] == ["mla"]
    _, m3 = pair("minimax-m3")
    with pytest.raises(ConfigError, match="layer 1: the keys of its indexer"):
        layer_kv(m3.spec.layers[1], "fp8_e4m3")
    assert layer_kv(m3.spec.layers[0], "fp8_e4m3").bytes_per_token > 0


def test_index_heads_are_dealt_with_the_kv_heads_that_they_choose_for() -> None:
    layer = pair("minimax-m3")[1].spec.layers[1]
    found = [shard_attention(layer, size).indexer for size in (1, 2)]
    assert [one.num_heads for one in found if isinstance(one, IndexerSpec)] == [2, 1]
    lightning = pair("v3.2")[1].spec.layers[1]
    assert shard_attention(lightning, 2).indexer == lightning.indexer
