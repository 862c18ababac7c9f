"""New weights for a running engine: afterwards it gives what a fresh one gives, and what is refused changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.architectures import quiet
from support.models.tiny_llama import write_model
from support.pages import ROOT, blocks
from transformers import AutoModelForCausalLM, DynamicCache

from headrace import LLM, SamplingParams
from headrace.core import commands
from headrace.core.request import Request
from headrace.core.weights import DiskSource, WeightResult
from headrace.errors import ConfigError, EngineError, UnavailableError, WeightsError
from headrace.outputs import OutputDelta
from headrace.weights.names import Target

PROMPT = list(range(40, 90))
RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from headrace import LLM
from headrace.core.commands import Checksums
from headrace.errors import ConfigError

rank, folder, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
policy = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    for weight in policy.parameters():
        weight.mul_(0.9)
whole = {name: value.clone() for name, value in policy.state_dict().items()}
fully_shard(policy, mesh=init_device_mesh("cpu", (2,)))
llm = None
if rank == 0:
    llm = LLM(folder, num_kv_blocks=16, num_threads=1, device="cpu")
    try:
        llm.update_weights(policy.state_dict())
    except ConfigError as error:
        assert "give what its full_tensor() returns" in str(error)
    else:
        raise AssertionError("a part of a weight was taken for the weight")
send(llm, policy)
if rank == 0:
    sums = llm._engine.executor.weights(Checksums()).checksums
    llm.update_weights(whole)
    assert llm._engine.executor.weights(Checksums()).checksums == sums
    llm.close()
    print("equal")
dist.destroy_process_group()
"""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Weights = dict[str, torch.Tensor]


def build(folder: Path, **args: Any) -> LLM:
    with quiet():
        return LLM(str(folder), **{"num_kv_blocks": 40, "max_num_seqs": 4, "num_threads": 1, "device": "cpu", **args})


def tokens_of(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (result,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    return list(result.outputs[0].token_ids)


def weights_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A width that attention kernels of GPUs know, so that steps are captured there.
    return write_model(tmp_path_factory.mktemp("old"), head_dim=64)


def changed(old: Path, folder: Path, change: Callable[[Weights], Weights]) -> Path:
    """A copy of the model, with other weights."""
    folder.mkdir(exist_ok=True)
    for file in old.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(change(weights_of(old)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def noisy(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(old, tmp_path_factory.mktemp("new"), noisy)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_an_updated_engine_is_a_fresh_one(old: Path, new: Path, implementation: Any, device: str) -> None:
    llm, fresh = (build(folder, model_impl=implementation, device=device) for folder in (old, new))
    before = tokens_of(llm)
    assert tokens_of(llm) == before
    hits = llm.stats.prefix_hit_tokens
    assert hits > 0
    places = [parameter.data_ptr() for parameter in llm._engine.executor.model.parameters()]
    assert llm.update_weights(weights_of(new)) == len(weights_of(new))
    # Captured graphs read where they read before.
    assert [parameter.data_ptr() for parameter in llm._engine.executor.model.parameters()] == places
    expected = tokens_of(fresh)
    assert expected != before
    assert tokens_of(llm) == expected
    assert llm.stats.prefix_hit_tokens == hits, "cached KV of the old weights was used"
    assert tokens_of(llm) == expected
    assert llm.stats.prefix_hit_tokens > hits, "the new weights' KV is cached in turn"
    llm.check_integrity()


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_some_weights_alone(old: Path, tmp_path: Path, implementation: Any) -> None:
    """A part of a fused matrix; in another dtype, and as pairs."""
    value = (3 * torch.randn(128, 64, generator=torch.Generator().manual_seed(2))).bfloat16()
    mixed = changed(old, tmp_path / "mixed", lambda weights: weights | {K_PROJ: value.float()})
    llm = build(old, model_impl=implementation)
    assert llm.update_weights([(K_PROJ, value)]) == 1
    assert tokens_of(llm) == tokens_of(build(mixed, model_impl=implementation))


@pytest.fixture(scope="module")
def llm(old: Path) -> LLM:
    return build(old)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(128, 64)}, r"has no weight model\.layers\.9"),
        ({K_PROJ: torch.zeros(128, 63)}, r"k_proj\.weight has the shape \[128, 64\], the update \[128, 63\]"),
        ({K_PROJ: torch.zeros(128, 64, dtype=torch.int64)}, r"k_proj\.weight is int64, and must be one of float64, float32"),
        ({K_PROJ: torch.zeros(128, 64, dtype=torch.float8_e4m3fn)}, r"k_proj\.weight is float8_e4m3fn"),
        ({K_PROJ: torch.zeros(128, 64, device="meta")}, r"k_proj\.weight must be a tensor with values"),
        ({K_PROJ: [0.0]}, r"k_proj\.weight must be a tensor with values, not list"),
        ([(K_PROJ, torch.zeros(128, 64)), (K_PROJ, torch.zeros(128, 64))], r"k_proj\.weight is given twice"),
    ],
)
def test_what_is_refused_changes_nothing(llm: LLM, value: Any, match: str) -> None:
    before = tokens_of(llm)
    hits = llm.stats.prefix_hit_tokens
    pairs = [("model.norm.weight", torch.zeros(64)), *(value.items() if isinstance(value, dict) else value)]
    with pytest.raises(ConfigError, match=match) as caught:
        llm.update_weights(pairs)
    assert caught.value.param == "tensors"
    assert tokens_of(llm) == before
    assert llm.stats.prefix_hit_tokens > hits


def test_a_tied_weight_is_what_it_is_tied_to(tmp_path: Path) -> None:
    llm = build(write_model(tmp_path, tie_word_embeddings=True))
    weights = dict(llm._engine.executor.model.named_parameters())
    embedding = weights["embed_tokens.weight"]
    name, tied = "model.embed_tokens.weight", "lm_head.weight"
    other = -embedding.clone()
    assert llm.update_weights({tied: other, name: other}) == 1
    assert torch.equal(embedding, other)
    assert llm.update_weights({tied: other}) == 0
    for update in ({tied: -other}, {tied: -other, name: other}):
        with pytest.raises(ConfigError, match=r"ties lm_head\.weight to embed_tokens\.weight, and the update gives it another"):
            llm.update_weights(update)
    assert torch.equal(embedding, other)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_packed_weights_are_packed_again(old: Path, new: Path, quantization: str) -> None:
    llm = build(old, quantization=quantization)
    before = tokens_of(llm)
    assert llm.update_weights(weights_of(new)) == len(weights_of(new))
    assert tokens_of(llm) == tokens_of(build(new, quantization=quantization)) != before
    with pytest.raises(
        ConfigError, match=r"k_proj\.weight is packed as one matrix with .*q_proj\.weight.*must have them too"
    ) as caught:
        llm.update_weights({K_PROJ: weights_of(old)[K_PROJ]})
    assert caught.value.param == "tensors"


def test_requests_that_run_are_in_the_way(llm: LLM, old: Path) -> None:
    core = llm._engine.core
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.add(Request(request_id="one", prompt_token_ids=PROMPT, sampling=sampling, max_tokens=8, seed=0))
    for started in (False, True):
        if started:
            core.step()
        with pytest.raises(EngineError, match="requests are running"):
            llm.update_weights(weights_of(old))
        with pytest.raises(EngineError, match="requests are running"):
            llm.weights_changed()
    core.abort("one")
    assert llm.update_weights(weights_of(old)) > 0
    llm.check_integrity()


def test_weights_are_torn_until_all_are_written(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plain, count = build(old), Target.fill, [0]

    def failing(part: Target, parameter: torch.Tensor, stored: torch.Tensor) -> None:
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("no memory")
        plain(part, parameter, stored)

    monkeypatch.setattr(Target, "fill", failing)
    with pytest.raises(EngineError, match="cut short: RuntimeError: no memory"):
        llm.update_weights(weights_of(new))
    monkeypatch.undo()
    with pytest.raises(UnavailableError, match="torn: update 1 failed: an update of weights was cut short"):
        tokens_of(llm)
    with pytest.raises(WeightsError, match=r"torn: .*; \d+ tensors were not written: "):
        llm.update_weights({K_PROJ: weights_of(new)[K_PROJ]})
    assert llm.update_weights(weights_of(new)) == len(weights_of(new))
    assert tokens_of(llm) == tokens_of(build(new))


def test_frozen_requests_go_on_with_the_kv_that_they_have(old: Path, new: Path) -> None:
    """They say what transformers says with the same cache, when its weights are replaced between two tokens."""
    llm, deltas = build(old, dtype="float32"), list[OutputDelta]()
    core = llm._engine.core
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    core.add(Request(request_id="one", prompt_token_ids=PROMPT, sampling=params, max_tokens=12, seed=0))
    for _ in range(6):
        deltas += core.step()
    for command in (
        commands.Pause("keep"),
        commands.Begin(),
        commands.Load(DiskSource(str(new))),
        commands.Finish(0),
        commands.Resume(),
    ):
        answers = list[WeightResult]()
        core.weights.submit(command, answers.append)
        while not answers:
            core.weights.poll()
            deltas += core.step() if core.runnable() else []
        assert answers[0].status == 200
    while core.has_work():
        deltas += core.step()
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [one.logprobs[0] for delta in deltas for one in delta.logprobs or ()]
    before, after = deltas[-1].weight_versions
    assert (before.version, before.end, after.version, after.end) == ("0", after.start, "1", 12)
    with torch.no_grad(), quiet():
        first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (old, new))
        cache, ids = DynamicCache(), PROMPT
        for place, (token, ours) in enumerate(zip(tokens, logprobs, strict=True)):
            model = first if place < after.start else second
            logits = model(torch.tensor([ids]), past_key_values=cache).logits[0, -1]
            assert logits.argmax() == token
            assert ours == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-4)
            ids = [token]
    assert tokens_of(llm) == tokens_of(build(new, dtype="float32")), "no request finds its KV, which is of two versions"


@pytest.mark.slow
def test_weights_that_are_cut_are_gathered_by_all_ranks(old: Path, tmp_path: Path) -> None:
    """The function of docs/rl.md, in two processes of FSDP."""
    [send] = [text for _, text in blocks(ROOT / "docs" / "rl.md", "python") if "full_tensor" in text]
    script = tmp_path / "rank.py"
    script.write_text(f"{send}\n{RANK}")
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(old), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    outputs = [one.communicate(timeout=240)[0] for one in reversed(ranks)]
    assert [one.returncode for one in ranks] == [0, 0] and "equal" in outputs[0]
