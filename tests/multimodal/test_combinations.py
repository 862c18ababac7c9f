"""Prompts with pictures beside what else an engine may do: constraints, sparse prompts, KV in FP8."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.served_pictures import MARKS, PICTURE, STEPS, engine, generate, of, picture, prompts, same, served
from support.vision_reference import BYTES

from headrace.errors import ConfigError, RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams, StructuredOutputsParams

SHAPE = "[0-9]{3}-[a-f]{2}"
ALLOWED = [b"0123456789"] * 3 + [b"-"] + [b"abcdef"] * 2


@of(["qwen2_5_vl", "gemma3"])
def test_a_constraint_masks_what_pictures_say(kind: str) -> None:
    """Prompts come in chunks, beside prompts without one; the best tokens that the constraint allows are transformers'."""
    own = served(kind)
    cases = prompts(kind)
    bound = {"structured_outputs": StructuredOutputsParams(regex=SHAPE), "allowed_token_ids": None}
    plain = {"temperature": 0.0, "max_tokens": STEPS, "logprobs": 0, "allowed_token_ids": list(range(BYTES))}
    names = ("two", "odd", "same twice")
    params = [SamplingParams(**plain | (bound if name != "odd" else {})) for name in names]
    outputs = own.llm.generate([cases[name] for name in names], params)
    for name, output in zip(names, outputs, strict=True):
        same(output, own.expected(cases[name], allowed=() if name == "odd" else ALLOWED))
    own.llm.check_integrity()


@of(["qwen2_5_vl", "llava"])
def test_prompts_with_pictures_attend_densely_beside_sparse_ones(kind: str) -> None:
    own = served(kind)
    sparse = {"sparse_prefill": "xattn", "sparse_threshold": 0.3, "sparse_min_tokens": 1, "max_num_batched_tokens": 160}
    llm = engine(own.folder, **sparse)
    mark, words = MARKS.get(kind, PICTURE), "words before a picture " * 15
    long = {"prompt": f"{words}{mark} and after it", "multi_modal_data": {"image": picture(90, 61)}}
    text = {"prompt_token_ids": list((words * 2).encode()[:450])}
    cases: list[Any] = [long, prompts(kind)["two"]]
    pictured, other, alone = generate(llm, *cases, text)
    for case, output in zip(cases, (pictured, other), strict=True):
        same(output, own.expected(case))
        assert output.attention is None
    assert alone.attention is not None and (alone.attention.density or 0) < 1
    with pytest.raises(RequestError, match="sparse_prefill is for prompts of text: images") as caught:
        generate(llm, long, sparse_prefill=True)
    assert caught.value.param == "sparse_prefill"
    same(generate(llm, long, sparse_prefill=False)[0], own.expected(long))


def test_a_model_whose_pictures_are_seen_both_ways_has_no_sparse_prompts() -> None:
    with pytest.raises(ConfigError, match="no layer of this model can attend sparsely: it has no mode visible_ends") as caught:
        engine(served("gemma3").folder, sparse_prefill="xattn", max_num_batched_tokens=160)
    assert caught.value.param == "sparse_prefill"


@of(["qwen2_5_vl", "gemma3"])
def test_a_cache_in_fp8_holds_pictures(kind: str) -> None:
    """Tokens of chunks, cached prefixes and features are those of the prompt alone, near those of float32."""
    own = served(kind)
    names, mark = ("two", "wide", "same twice"), MARKS.get(kind, PICTURE)
    cases = {name: prompts(kind)[name] for name in names}
    stored = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "reference"}
    usual = engine(own.folder, **stored, max_num_batched_tokens=512, enable_prefix_caching=False)
    alone = {name: generate(usual, case)[0] for name, case in cases.items()}
    tight = engine(own.folder, **stored)
    long = "some words before this picture, " + mark
    cases["long"] = {"prompt": long, "multi_modal_data": {"image": picture(112, 112, 5)}}
    alone["long"] = generate(usual, cases["long"])[0]
    for turn in range(2):
        found = generate(tight, *cases.values())
        assert bool(sum(output.num_cached_tokens or 0 for output in found)) == bool(turn)
        for name, output in zip(cases, found, strict=True):
            assert output.outputs[0].token_ids == alone[name].outputs[0].token_ids
            assert numbers(output) == pytest.approx(numbers(alone[name]), abs=1e-3)
    exact = numbers(generate(own.llm, cases["long"])[0])
    assert numbers(alone["long"])[0] != exact[0]
    assert numbers(alone["long"])[0] == pytest.approx(exact[0], abs=0.3)


@of(["qwen2_5_vl", "qwen3_vl", "gemma3", "llava"])
def test_logprobs_of_prompts_with_pictures(kind: str) -> None:
    """Those of features' tokens too; they do not come from a cached prefix."""
    own = served(kind)
    for name in ("two", "same twice"):
        prompt = prompts(kind)[name]
        generate(own.llm, prompt)
        (output,) = generate(own.llm, prompt, prompt_logprobs=0, n=2)
        first, *others = output.prompt_logprobs or []
        assert first is None
        tokens = (output.prompt_token_ids or [])[1:]
        found = [(entry or {})[token].logprob for token, entry in zip(tokens, others, strict=True)]
        assert found == pytest.approx(own.prompt_logprobs(prompt), abs=1e-4)
        for sample in output.outputs:
            assert sample.token_ids == own.expected(prompt).token_ids


HETEROGENEOUS = {
    "list": {"num_key_value_heads_list": [2, 1, 2]},
    "per layer": {"per_layer_config": {"1": {"num_key_value_heads": 1}}},
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("qwen2_5_vl", "list"),
        ("gemma3", "per layer"),
        pytest.param("qwen2_5_vl", "per layer", marks=pytest.mark.slow),
        pytest.param("gemma3", "list", marks=pytest.mark.slow),
        *(pytest.param("llava", said, marks=pytest.mark.slow) for said in HETEROGENEOUS),
    ],
)
def test_layers_may_differ_in_heads_beside_a_tower(kind: str, said: str, tmp_path: Path) -> None:
    """A layer with one KV head is one whose two are alike, which transformers computes."""
    own = served(kind)
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= HETEROGENEOUS[said]
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "model.safetensors")
    theirs = copy.deepcopy(own.theirs)
    alike = re.compile(r"^(?!.*(vision|visual)).*layers\.1\.self_attn\.[kv]_proj\.(weight|bias)$")
    assert sum(alike.match(name) is not None for name in state) in (2, 4)
    for parameters in (state, theirs.state_dict()):
        for name, tensor in parameters.items():
            if alike.match(name):
                tensor[len(tensor) // 2 :] = tensor[: len(tensor) // 2]
    halves = {name: tensor[: len(tensor) // 2].clone() if alike.match(name) else tensor for name, tensor in state.items()}
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    uneven = dataclasses.replace(own, theirs=theirs, llm=engine(tmp_path))
    assert [line.num_kv_heads for line in uneven.llm.info.layers] == [2, 1, 2]
    names = ("two", "same twice")
    for name, output in zip(names, generate(uneven.llm, *(prompts(kind)[name] for name in names)), strict=True):
        same(output, uneven.expected(prompts(kind)[name]))
    uneven.llm.check_integrity()


def numbers(output: RequestOutput) -> list[float]:
    (sample,) = output.outputs
    return [next(iter(entry.values())).logprob for entry in sample.logprobs or []]


def test_another_librarys_module_reads_text_alone() -> None:
    own = served("llava")
    llm = engine(own.folder, model_impl="transformers")
    (reason,) = [line.reason for line in llm.info.decisions if line.name == "vision encoder"]
    assert reason == "pictures of llava are for its native implementation, which does not run here (model_impl)"
    with pytest.raises(RequestError, match="reads text alone: pictures of llava are for its native"):
        generate(llm, prompts("llava")["small"])
    with pytest.raises(RequestError, match=r"stands for image content.* reads text alone: pictures of llava are for"):
        generate(llm, "a<image>b")
    (theirs,), (usual,) = generate(llm, "text alone"), generate(own.llm, "text alone")
    assert theirs.outputs[0].token_ids == usual.outputs[0].token_ids


def test_what_keeps_pictures_out_is_said(tmp_path: Path) -> None:
    """A tokenizer, or a processor, that is not there: text works, and the refusal has the reason."""
    own = served("llava")
    for file in own.folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = {"prompt_token_ids": list(b"text alone")}
    (expected,), image = generate(own.llm, tokens), own.theirs.config.image_token_id
    for llm, why in (
        (engine(own.folder, skip_tokenizer_init=True), "the placeholders of media need a tokenizer"),
        (engine(tmp_path), "has no image processor that can be used"),
    ):
        (found,) = generate(llm, tokens, detokenize=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        with pytest.raises(RequestError, match=f"this engine reads text alone: .*{why}"):
            llm.generate(tokens | {"multi_modal_data": {"image": picture(20, 20)}}, SamplingParams(detokenize=False))
        with pytest.raises(RequestError, match=f"stands for image content.*; this engine reads text alone: .*{why}"):
            llm.generate({"prompt_token_ids": [97, image]}, SamplingParams(detokenize=False))
