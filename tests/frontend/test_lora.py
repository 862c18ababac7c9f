"""Adapters beside the base model: each sequence gets what merged weights give, whatever else is in its step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models.adapters import check_greedy, logprobs, merged, randomise, write_adapter
from support.models.architectures import quiet
from support.models.tiny_llama import write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace import LLM, LoRARequest, SamplingParams
from headrace.core.request import AdapterRef
from headrace.errors import ConfigError, ConflictError, UnknownModelError
from headrace.layers.linear import FusedLinear, Linear
from headrace.models.adapters import AdapterTargets

CONFIGS: dict[str, dict[str, Any]] = {
    "four": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8},
    "eight": {"r": 8, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
    "many": {"r": 24, "use_rslora": True, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(base, folder / name, seed, **config) for seed, (name, config) in enumerate(CONFIGS.items())}


@pytest.fixture(scope="module")
def models(base: Path, adapters: dict[str, Path]) -> dict[str | None, PreTrainedModel]:
    return {name: merged(base, None if name is None else adapters[name]) for name in (None, *adapters)}


def build(base: Path, **args: Any) -> LLM:
    with quiet():
        defaults = {"enable_lora": True, "max_lora_rank": 24, "device": "cpu", "num_kv_blocks": 80, "num_threads": 1}
        return LLM(str(base), **{**defaults, **args})


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with build(base, max_loras=3, max_num_batched_tokens=24, max_num_seqs=6) as one:
        yield one


def params(count: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()}


def request(adapters: dict[str, Path], name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, lora_path=str(adapters[name]))


def test_embeddings_are_those_of_merged_weights(
    llm: LLM, models: dict[str | None, PreTrainedModel], adapters: dict[str, Path]
) -> None:
    text = prompt(30)
    for name in ("eight", None):
        (given,) = llm.embed([text], lora_request=request(adapters, name))
        with torch.inference_mode():
            states = models[name].model(torch.tensor([text["prompt_token_ids"]])).last_hidden_state[0, -1]
        assert torch.allclose(torch.tensor(given.outputs.embedding), states / states.norm(), atol=1e-5)


def test_rows_of_three_adapters_and_the_base_equal_merged_weights(
    llm: LLM, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel]
) -> None:
    names = ["four", None, "eight", "many", "eight", None]
    prompts = [prompt(length, seed) for seed, length in enumerate((50, 33, 40, 7, 61, 20))]
    # Steps of 24 tokens: every prompt but one is computed in chunks, beside others' decode rows.
    for _ in range(2):
        outputs = llm.generate(prompts, params(), lora_request=[request(adapters, name) for name in names])
        for name, output in zip(names, outputs, strict=True):
            check_greedy(models[name], output)
    assert all(output.num_cached_tokens for output in outputs[:3]), "the second time prefixes are found"


def test_adapters_of_peft_equal_what_peft_merges(llm: LLM, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    fields = {"r": 6, "target_modules": r".*\.(q_proj|k_proj|up_proj|down_proj)", "lora_alpha": 12}
    fields |= {"rank_pattern": {"layers.0.mlp.up_proj": 3}, "alpha_pattern": {"down_proj": 24, "^model.layers.1.*q_proj": 1}}
    with quiet():
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**fields))
    randomise(model)
    model.save_pretrained(tmp_path / "peft")
    (output,) = llm.generate(prompt(30), params(), lora_request=LoRARequest("peft", lora_path=str(tmp_path / "peft")))
    llm.unload_lora("peft")
    check_greedy(model.merge_and_unload().eval(), output)


def test_more_adapters_than_places_are_served_in_turns(
    base: Path, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel]
) -> None:
    names = ["four", "eight", "many", None, "four", "eight", "many"]
    with build(base, max_loras=1) as llm:
        outputs = llm.generate(
            [prompt(20, seed) for seed in range(7)], params(), lora_request=[request(adapters, name) for name in names]
        )
        for name, output in zip(names, outputs, strict=True):
            check_greedy(models[name], output)
        llm.check_integrity()


def test_preempted_sequences_and_samples_of_one_prompt_keep_their_adapter(
    base: Path, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel]
) -> None:
    names = ["four", "eight", None, "many"]
    # Four sequences of up to 80 tokens do not fit in 16 blocks of 16.
    with build(base, num_kv_blocks=16, max_model_len=128) as llm:
        requests = [request(adapters, name) for name in names]
        outputs = llm.generate([prompt(48, seed) for seed in range(4)], params(32), lora_request=requests)
        assert llm.stats.num_preemptions
        for name, output in zip(names, outputs, strict=True):
            check_greedy(models[name], output)
        sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=0)
        (output,) = llm.generate(prompt(40), sampled, lora_request=requests[1])
        for sample in output.outputs:
            expected = logprobs(models["eight"], [*output.prompt_token_ids, *sample.token_ids])[39:-1]
            for row, token, entry in zip(expected, sample.token_ids, sample.logprobs, strict=True):
                assert abs(row[token].item() - entry[token].logprob) < 1e-4


def test_rows_of_the_base_do_not_depend_on_adapters_beside_them(llm: LLM, adapters: dict[str, Path]) -> None:
    """Bit for bit. Without any, the last layer multiplies fewer rows, which some CPUs sum up in another order."""
    prompts = [prompt(10, seed) for seed in range(3)]

    def first(adapter: str | None) -> list[Any]:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params(4), lora_request=[request(adapters, adapter), None, None])
        return [(sample.token_ids, sample.logprobs) for output in outputs[1:] for sample in output.outputs]

    many, without = first("many"), first(None)
    assert many == first("four")
    for (tokens, ours), (expected, theirs) in zip(many, without, strict=True):
        assert tokens == expected
        for token, one, other in zip(tokens, ours, theirs, strict=True):
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)


def test_equal_content_shares_prefixes_under_any_name(llm: LLM, adapters: dict[str, Path]) -> None:
    llm.reset_prefix_cache()
    asked = prompt(60, seed=9)

    def cached(lora: LoRARequest | None) -> int:
        (output,) = llm.generate(asked, params(1), lora_request=lora)
        return output.num_cached_tokens

    assert cached(request(adapters, "four")) == 0
    assert cached(None) == 0 == cached(request(adapters, "eight"))
    assert cached(LoRARequest("another", lora_path=str(adapters["four"]))) == 48
    assert cached(LoRARequest("another", lora_path=str(adapters["many"]))) == 0, "the name has other content now"
    llm.unload_lora("another")
    with pytest.raises(UnknownModelError, match="no adapter 'another'"):
        llm.generate(asked, params(1), lora_request=LoRARequest("another"))


def test_an_adapter_is_read_once_and_replaced_on_request(
    llm: LLM, base: Path, adapters: dict[str, Path], tmp_path: Path, models: dict[str | None, PreTrainedModel]
) -> None:
    folder = write_adapter(base, tmp_path / "step", seed=0, **CONFIGS["four"])
    named = LoRARequest("policy", lora_path=str(folder))
    (before,) = llm.generate(prompt(20), params(), lora_request=named)
    check_greedy(models["four"], before)
    write_adapter(base, folder, seed=1, **CONFIGS["eight"])
    (same,) = llm.generate(prompt(20), params(), lora_request=named)
    check_greedy(models["four"], same)
    llm.load_lora(LoRARequest("policy", lora_path=str(folder), load_inplace=True))
    (after,) = llm.generate(prompt(20), params(), lora_request=named)
    check_greedy(models["eight"], after)
    llm.unload_lora("policy")


def test_steps_go_on_while_an_adapter_is_read(
    llm: LLM, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_read, read, answers = llm._engine, threading.Event(), AdapterTargets.read, list[Exception | None]()
    monkeypatch.setattr(AdapterTargets, "read", lambda *args: read(*args) if may_read.wait(60) else None)
    named = LoRARequest("beside", lora_path=str(adapters["four"]))
    engine.core.adapters.drop(llm._adapters(request(adapters, "four"), 1)[0].digest)
    adapter = engine.adapters.names.read(named)
    engine.core.adapters.begin(adapter.files, answers.append)
    (output,) = llm.generate(prompt(30), params())
    check_greedy(models[None], output)
    engine.core.adapters.poll()
    assert engine.core.adapters.loading and not answers
    may_read.set()
    engine.adapters.names.put(adapter)
    (output,) = llm.generate(prompt(30), params(), lora_request=LoRARequest("beside"))
    assert answers == [None], "a request waits for its adapter"
    check_greedy(models["four"], output)
    llm.unload_lora("beside")


def test_nothing_is_evicted(base: Path, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel]) -> None:
    with build(base, max_cpu_loras=2, max_loras=1) as llm:
        for name in ("four", "eight"):
            llm.load_lora(LoRARequest(name, lora_path=str(adapters[name])))
        llm.load_lora(LoRARequest("alias", lora_path=str(adapters["four"])))  # The same content takes no room.
        with pytest.raises(ConflictError, match="max_cpu_loras"):
            llm.load_lora(LoRARequest("many", lora_path=str(adapters["many"])))
        llm.unload_lora("alias")
        (output,) = llm.generate(prompt(20), params(), lora_request=LoRARequest("four"))
        check_greedy(models["four"], output)
        llm.load_lora(LoRARequest("four", lora_path=str(adapters["many"])))
        (output,) = llm.generate(prompt(20), params(), lora_request=LoRARequest("four"))
        check_greedy(models["many"], output)


def test_a_request_names_an_adapter_that_is_not_there(llm: LLM) -> None:
    made = llm.inputs.request(prompt(5), params(1), request_id="x", adapter=AdapterRef("gone", "00"))
    with pytest.raises(UnknownModelError, match="'gone' is not loaded"):
        llm._engine.core.add(made)


def test_engines_and_adapters_that_do_not_fit_are_refused(base: Path, adapters: dict[str, Path], llm: LLM) -> None:
    with build(base, enable_lora=False) as plain, pytest.raises(ConfigError, match="--enable-lora"):
        plain.load_lora(LoRARequest("four", lora_path=str(adapters["four"])))
    with pytest.raises(ConfigError, match=r"lora_target_modules has query, and .* down_proj"):
        build(base, lora_target_modules=("query",))
    with build(base, lora_target_modules=("q_proj",)) as some, pytest.raises(ConfigError, match=r"down_proj.*has q_proj alone"):
        some.load_lora(LoRARequest("eight", lora_path=str(adapters["eight"])))
    with pytest.raises(ConfigError, match="native models"):
        build(base, model_impl="transformers")
    with pytest.raises(ConfigError, match="lora_int_id"):
        LoRARequest("four", 0, str(adapters["four"]))
    with pytest.raises(TypeError, match="lora_request"):
        llm.generate("x", params(1), lora_request="four")


def test_adapters_are_added_to_packed_weights(
    base: Path, adapters: dict[str, Path], models: dict[str | None, PreTrainedModel]
) -> None:
    """Steps with adapters run layer by layer, those of the base in one native call: both multiply the rounded weights."""
    with build(base, quantization="int8", quantize_head="none") as llm:
        rounded = {}
        for path, layer in llm._engine.executor.model.named_modules():
            if isinstance(layer, Linear) and path.startswith("layers."):
                parts = layer.parts if isinstance(layer, FusedLinear) else {path.rpartition(".")[2]: layer.out_features}
                own = layer.method.dequantize(layer).split(list(parts.values()))
                rounded |= {f"model.{path.rpartition('.')[0]}.{name}": rows for name, rows in zip(parts, own, strict=True)}
        outputs = llm.generate([prompt(30)] * 2, params(), lora_request=[request(adapters, "eight"), None])
    for name, output in zip(("eight", None), outputs, strict=True):
        model = copy.deepcopy(models[name])
        for path, rows in rounded.items():
            model.get_submodule(path).weight.data += rows - models[None].get_submodule(path).weight.data
        expected = logprobs(model, [*output.prompt_token_ids, *output.outputs[0].token_ids])[29:-1]
        for row, token, entry in zip(expected, output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            # The kernels round activations to 8 bits too.
            assert abs(row[token].item() - entry[token].logprob) < 0.2


def test_adapters_outlast_an_update_of_the_base(base: Path, adapters: dict[str, Path]) -> None:
    with build(base) as llm:
        (before,) = llm.generate(prompt(30), params(), lora_request=request(adapters, "eight"))
        weights = load_file(base / "model.safetensors")
        llm.update_weights({name: 1.25 * weight for name, weight in weights.items() if "self_attn" in name})
        (after,) = llm.generate(prompt(30), params(), lora_request=request(adapters, "eight"))
        assert after.num_cached_tokens == 0
    model = merged(base, adapters["eight"])
    plain = merged(base, None)
    for name, parameter in model.named_parameters():
        if "self_attn" in name:
            parameter.data += 0.25 * plain.get_parameter(name).data
    check_greedy(model, after)
    assert before.outputs[0].logprobs != after.outputs[0].logprobs


def test_tables_are_in_the_ledger(llm: LLM) -> None:
    (line,) = [line for line in llm.info.memory if line.name == "LoRA adapters"]
    # Two layers of q, k, v, o, gate, up and down; A once for each of them.
    values = 2 * 24 * (64 * 3 + 128 + 64 + 64 + 64 * 2 + 256 + 128 + 64)
    assert line.nbytes == 3 * 4 * values
