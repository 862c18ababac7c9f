"""PawQwen3 and PawLlama: their configurations, their checkpoints, and the options that concern them."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from support.models.paw import CONFIG, tensors, write
from support.models.tiny_llama import write_tokenizer
from support.runner.harness import prompt
from support.runner.sparse_world import BLOCK, MAX_LEN, Reference, SparseWorld, elastic, model, spec_of
from transformers import LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from headrace.attention.sparse import SparsePrefillAttention
from headrace.cli import heatmap
from headrace.cli.heatmap import page, png
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.frontend.explain import explain
from headrace.frontend.llm import LLM
from headrace.model_spec import ELASTIC_MODES, ModelSpec, VisionSpec
from headrace.models import implementation, registry
from headrace.models.fused import FusedLayers
from headrace.models.fusible import _objections
from headrace.resolve.facts import DecisionLog
from headrace.resolve.sparse import sparse, with_yarn_factor
from headrace.sampling_params import SamplingParams
from headrace.sources.files import find_model

LLAMA: dict[str, Any] = {"architectures": ["PawLlamaForCausalLM"], "model_type": "llama"}


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", device="cpu", kv_cache_memory=2**24, **options)


@pytest.mark.parametrize(("changes", "page"), [({}, 16), (LLAMA, 32)], ids=["qwen3", "llama"])
def test_a_checkpoint_is_served(changes: dict[str, Any], page: int, tmp_path: Path) -> None:
    """The grid of blocks is the checkpoint's, whatever the KV cache's blocks are."""
    (architecture,) = (CONFIG | changes)["architectures"]
    tokens = prompt(60, 450)
    world = SparseWorld(elastic=elastic("xattn", "streaming"), architecture=architecture)
    expected, _ = Reference(world).generate(tokens, 4)
    trace = Reference(world)(tokens, len(tokens))
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engine(write(tmp_path, tensors(architecture), **changes), block_size=page) as llm:
        assert llm._engine.config.cache.block_size == page
        notes = {note.name: note for note in llm.info.decisions}
        assert notes["elastic attention"].value == "xattn and streaming heads"
        (output,) = llm.generate([{"prompt_token_ids": tokens}], greedy)
        (dense,) = llm.generate([{"prompt_token_ids": tokens}], greedy.replace({"sparse_prefill": False}))
    assert output.outputs[0].token_ids == expected
    report = output.attention
    assert report is not None and dense.attention is None
    assert (report.mode, report.exact, report.block, report.threshold) == ("elastic", True, BLOCK, 0.6)
    names = [["streaming", "xattn"][answer] for layer in trace.classes for one in layer for answer in one]
    assert [kind for layer in report.head_types[0] for kind in layer] == names
    pairs = len(trace.blocks[0]) * report.computed
    assert report.layers == pytest.approx([int(blocks.sum()) / pairs for blocks in trace.blocks])
    assert report.density == pytest.approx(sum(int(blocks.sum()) for blocks in trace.blocks) / (2 * pairs))


def test_flux_checkpoints_are_refused(tmp_path: Path) -> None:
    weights = tensors()
    for layer in range(2):
        here = f"model.layers.{layer}.self_attn.mask_allocator"
        weights[f"{here}.cls_feat_extractor.0.weight"] = torch.zeros(128, 16)
        weights[f"{here}.cls_feat_extractor.0.bias"] = torch.zeros(128)
    with pytest.raises(ConfigError, match=r"cls_feat_extractor\.0\..* Flux Attention"):
        engine(write(tmp_path, weights))


def test_types_of_heads() -> None:
    """A query head has the type of its KV head, and stands beside the others of it; retrieval heads are those of class 1."""
    expected = {
        ("full", "xattn"): [[0, 0, 1, 1, 0, 0], [1] * 6],
        ("full", "streaming"): [[0, 0, -1, -1, 0, 0], [-1] * 6],
        ("xattn", "streaming"): [[1, 1, -1, -1, 1, 1], [-1] * 6],
        ("xattn", "xattn"): [[1] * 6, [1] * 6],
        ("full", "full"): [[0] * 6, [0] * 6],
    }
    assert set(expected) == set(ELASTIC_MODES)
    classes = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)
    rows: Any = SimpleNamespace(slots=range(2), classes_of=lambda layer, kv_heads: classes)
    for modes, types in expected.items():
        config = SparseWorld(elastic=elastic(*modes)).sparse
        assert config is not None
        found = SparsePrefillAttention(config)._types_of(rows, spec_of().layers[0], torch.device("cpu"))
        assert found.dtype == torch.int8 and found.tolist() == types and found.is_contiguous()


PAIRS = [
    *(("streaming", "xattn"), ("streaming", "streaming"), ("xattn", "full")),
    *(("full", "local"), ("full", "none"), ("triangle", "topk"), ("", "")),
]


@pytest.mark.parametrize("modes", PAIRS, ids=str)
@pytest.mark.parametrize("impl", ["auto", "native", "transformers"])
def test_other_pairs_of_modes_are_refused(modes: tuple[str, str], impl: str, tmp_path: Path) -> None:
    """Nor does transformers' module of the plain model, which has no routers, take over."""
    write(tmp_path, {}, retrieval_mode=modes[0], toggle_type=modes[1])
    args = EngineArgs(model=str(tmp_path), model_impl=impl)
    expected = "leave out the routers" if impl == "transformers" else r"supported are \(full, xattn\), \(full, streaming\)"
    with pytest.raises(ConfigError, match=expected):
        implementation.choose(args, find_model(args))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("toggle_type", "full"),
        ("toggle_type", "triangle"),
        ("toggle_type", 3),
        ("pooling_mode", "first_token"),
        ("use_softmax", False),
        ("enable_ada_sparsity", False),
        ("block_size", 96),
        ("block_size", "128"),
        ("xattn_stride", 12),
        ("xattn_stride", 256),
        ("xattn_threshold", 1.5),
        ("xattn_threshold", 0),
        ("xattn_norm", -1),
        ("sink_size", -1),
        ("local_window_size", 0),
        ("local_window_size", 2**40),
    ],
)
def test_fields_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.model_spec(Qwen3Config(**CONFIG | {field: value}))
    assert caught.value.param == field


def test_transformers_does_not_take_over_a_model_with_routers(tmp_path: Path) -> None:
    args = EngineArgs(model=str(write(tmp_path, {})), model_impl="transformers")
    with pytest.raises(ConfigError, match="qwen3 would leave out the routers of PawQwen3ForCausalLM"):
        implementation.choose(args, find_model(args))


def test_fields_that_are_absent_have_the_values_of_training() -> None:
    config = LlamaConfig(
        vocab_size=160, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, architectures=["PawLlamaForCausalLM"]
    )
    spec = registry.model_spec(config)
    assert spec.elastic is not None and (spec.architecture, spec.qk_norm) == ("PawLlamaForCausalLM", False)
    assert config.architectures == ["PawLlamaForCausalLM"]
    assert spec.elastic.types == (-1, 0)
    assert (spec.elastic.sink_blocks, spec.elastic.local_blocks, spec.elastic.block) == (1, 16, 128)
    assert (spec.elastic.stride, spec.elastic.norm, spec.elastic.threshold) == (16, 1.0, 0.9)


def test_plain_models_have_no_router() -> None:
    spec = registry.model_spec(Qwen3Config(**CONFIG | {"architectures": ["Qwen3ForCausalLM"]}))
    assert spec.elastic is None and spec.architecture == "Qwen3ForCausalLM"


def test_the_factor_of_yarn_is_read_both_ways() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    spec = registry.model_spec(Qwen3Config(**CONFIG | {"rope_scaling": scaling, "max_position_embeddings": 832}))
    factors = {}
    for choice in ("checkpoint", "positions"):
        log = DecisionLog()
        chosen = with_yarn_factor(EngineArgs(yarn_factor=choice), spec, log)
        rope = chosen.layers[0].rope
        assert rope is not None
        factors[choice] = (rope.parameters["factor"], chosen.max_position)
        assert [note.name for note in log.entries] == ["rotary embedding"]
    assert factors == {"checkpoint": (8.0, 1024), "positions": (6.5, 832)}
    with pytest.raises(ConfigError, match="yarn_factor"):
        with_yarn_factor(EngineArgs(yarn_factor="positions"), spec_of(), DecisionLog())


def resolved(spec: Any = None, batched: int = 2048, **options: Any) -> Any:
    args = EngineArgs(**options)
    return sparse(args, spec or spec_of(), "cpu", "float32", "float32", batched, MAX_LEN, DecisionLog())


def with_bidirectional_pictures(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, vision=VisionSpec(model_type="gemma3", bidirectional=True))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"sparse_threshold": 0.5}, "sparse_threshold"),
        ({"sparse_prefill": "off", "sparse_min_tokens": 5}, "sparse_min_tokens"),
        ({"sparse_selection": "upstream"}, "sparse_selection"),
        ({"sparse_prefill": "mean", "sparse_selection": "upstream"}, "sparse_selection"),
        ({"sparse_prefill": "xattn", "deterministic": True}, "sparse_prefill"),
        ({"spec": spec_of(elastic_spec=elastic()), "tensor_parallel_size": 6}, "tensor_parallel_size"),
        ({"sparse_prefill": "xattn", "spec": with_bidirectional_pictures(spec_of())}, "sparse_prefill"),
        ({"sparse_prefill": "mean", "elastic_max_exact_tokens": 512}, "elastic_max_exact_tokens"),
        ({"sparse_prefill": "xattn", "batched": 100}, "max_num_batched_tokens"),
        ({"sparse_prefill": "xattn", "max_prefill_tokens_beside_decode": 100}, "max_prefill_tokens_beside_decode"),
        ({"spec": spec_of(elastic_spec=elastic(block=256)), "elastic_max_exact_tokens": 300}, "elastic_max_exact_tokens"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    assert caught.value.param == param


def test_what_is_decided() -> None:
    assert resolved() is None
    free = resolved(sparse_prefill="xattn")
    assert (free.selector.name, free.types, free.selector.threshold, free.min_tokens, free.block) == (
        "xattn",
        None,
        0.9,
        8192,
        128,
    )
    routed = resolved(spec_of(elastic_spec=elastic()))
    assert (routed.types, routed.selector.threshold, routed.min_tokens, routed.max_exact_tokens) == ((1, 0), 0.6, 0, MAX_LEN)
    assert resolved(spec_of(elastic_spec=elastic()), sparse_threshold=0.8).selector.threshold == 0.8
    assert resolved(spec_of(elastic_spec=elastic()), sparse_prefill="off") is None
    assert resolved(spec_of(elastic_spec=elastic()), sparse_prefill="mean").types is None


def test_layers_that_stay_dense_are_named() -> None:
    """The start-up report and doctor name them with the reason; a model's own router takes all of its layers."""
    plain = spec_of(num_layers=6)
    changes: dict[int, dict[str, Any]] = {0: {"window": 128}, 1: {"window": 128}, 2: {"window": 128}, 5: {"soft_cap": 30.0}}
    layers = tuple(dataclasses.replace(layer, **changes.get(layer.layer, {})) for layer in plain.layers)
    mixed = dataclasses.replace(plain, layers=layers)
    notes: dict[str, list[tuple[str, str]]] = {}
    for choice in ("off", "xattn"):
        log = DecisionLog()
        chosen = sparse(EngineArgs(sparse_prefill=choice), mixed, "cpu", "float32", "float32", 2048, MAX_LEN, log)
        notes[choice] = [(note.value, note.reason) for note in log.entries]
    assert chosen is not None and chosen.heads == (0, 0, 0, 6, 6, 0)
    assert notes["xattn"][:2] == [
        ("not in layers 0\N{EN DASH}2", "it has a sliding window"),
        ("not in layer 5", "it has a soft cap"),
    ]
    ((value, reason),) = notes["off"]
    dense = "not layers 0\N{EN DASH}2: it has a sliding window; not layer 5: it has a soft cap"
    assert (value, reason) == ("off", f"2 of 6 layers could attend sparsely in prompts; {dense}")
    with pytest.raises(ConfigError, match="layer 0 cannot attend as its router decides: it has a sliding window"):
        resolved(dataclasses.replace(mixed, elastic=elastic()))


def test_the_native_call_of_all_layers_takes_routers() -> None:
    """It declines steps with sparse rows instead."""
    (layer, *_) = model(spec_of(elastic_spec=elastic())).layers
    assert not any("kind" in why or "plain" in why for why in _objections(layer, torch.float32))
    step: Any = SimpleNamespace(step=SimpleNamespace(sparse=object()))
    assert not object.__new__(FusedLayers).takes(step)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_is_explained(tmp_path: Path, chunked: bool) -> None:
    """Routed in one piece; or selected in chunks, whose rows are put together."""
    tokens = prompt(61, 450)
    world = SparseWorld(selector="xattn") if chunked else SparseWorld(elastic=elastic("xattn", "streaming"))
    options: dict[str, Any] = {"sparse_prefill": "xattn", "sparse_threshold": 0.6, "max_num_batched_tokens": 128}
    options |= {"sparse_min_tokens": 0, "max_num_seqs": 4}
    if chunked:
        world = dataclasses.replace(world, grid=128)
    blocks = Reference(world)(tokens, len(tokens)).blocks
    with engine(write(tmp_path, tensors()), enable_prefix_caching=False, **(options if chunked else {})) as llm:
        found = explain(llm, {"prompt_token_ids": tokens}, layer=1, head=4)
        with pytest.raises(ConfigError, match="no layer 2"):
            explain(llm, {"prompt_token_ids": tokens}, layer=2)
    assert found.blocks == [row.nonzero().flatten().tolist() for row in blocks[1][4]]
    causal = len(found.blocks) * (len(found.blocks) + 1) // 2
    for densities, layer in zip(found.heads, blocks, strict=True):
        assert densities == pytest.approx([int(head.sum()) / causal for head in layer])
    picture = Image.open(io.BytesIO(png(found))).convert("RGB")
    colours = {colour for _, colour in picture.getcolors(10**6) or ()}
    assert {heatmap.colour(density) for row in found.heads for density in row} <= colours
    text = page(found)
    assert "data:image/png;base64," in text and ("streaming" in text) == (not chunked)


def test_a_prompt_that_is_too_short_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    with engine(write(tmp_path, tensors()), enable_prefix_caching=False, sparse_prefill="xattn", sparse_min_tokens=100) as llm:
        before = llm.stats.step
        with pytest.raises(RequestError, match="from 100 tokens on") as refused:
            explain(llm, {"prompt_token_ids": prompt(61, 99)})
        assert refused.value.param == "prompt" and llm.stats.step == before


def test_a_dense_prompt_has_nothing_to_explain(tmp_path: Path) -> None:
    with (
        engine(write(tmp_path, tensors()), sparse_prefill="off") as llm,
        pytest.raises(ConfigError, match="attend densely"),
    ):
        explain(llm, {"prompt_token_ids": [3, 4]})


def test_the_command_explains(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path, tensors()))
    text = tmp_path / "prompt.txt"
    text.write_text("abc " * 40)
    words = ["explain", str(tmp_path), "--prompt-file", str(text), "--png", str(tmp_path / "a.png"), "--html"]
    words += [str(tmp_path / "a.html"), "--json", "--device", "cpu", "--kv-cache-memory", "16MiB"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["prompt_tokens"], found["report"]["mode"], len(found["heads"])) == (160, "elastic", 2)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<img" in (tmp_path / "a.html").read_text()
    assert CliRunner().invoke(app, ["explain", str(tmp_path)]).exit_code == 2
