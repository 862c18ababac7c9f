"""TRL's ``AsyncGRPOTrainer``, unmodified, trains a tiny model against the server; only vLLM's helpers are replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.harness import running
from support.trl.stub import write_stub
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM
from headrace.option_groups import WeightTransferConfig
from headrace.server.settings import ServerSettings

STEPS = 4
CLIENT = """
import json
import sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1])
ids = [[5, 6, 7], [8, 9]]
greedy = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 4}
found = client.generate(ids, n=2, **greedy)
found["again"] = client.generate(ids, **greedy)["completion_ids"]
found["chat"] = client.chat([[{"role": "user", "content": "Hi"}]], **greedy)["completion_ids"]
found["scores"] = client.get_sequence_logprobs([[*ids[0], *found["again"][0]]], [3], top_logprobs=2)
client.reset_prefix_cache()
print(json.dumps(found))
"""
TRL = importlib.util.find_spec("trl")


def write_qwen3(folder: Path) -> None:
    """Two layers with a tied head, and the chat template that TRL knows by its bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["The mill wheel turns and the water runs over the stone."] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    assert TRL is not None and TRL.origin is not None
    tokenizer.chat_template = (Path(TRL.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def ran(stub: Path, *arguments: str) -> Any:
    """Runs a program that imports TRL, and returns the JSON of the last line that it prints."""
    path = os.pathsep.join((str(stub), str(Path(__file__).parents[1]), *filter(None, sys.path)))
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-20000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def trained(folder: Path, *more: str, settings: dict[str, Any], **args: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The trainer's log, and the server's state in the end: its weights and the names of its models."""
    model, stub = folder / "model", folder / "stub"
    write_qwen3(model)
    write_stub(stub)
    engine = EngineArgs(model=str(model), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=256, **args)
    served = ServerSettings(enable_rl_api=True, served_model_names=(str(model),), **settings)
    with running(AsyncLLM(engine), served) as server:
        log = ran(stub, "-m", "support.trl.program", str(model), server.url, str(folder / "out"), str(STEPS), *more)
        models = [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]
        return log, httpx.get(f"{server.url}/weight_info").json() | {"models": models}


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="trl is not installed: pip install 'headrace[trl]'")
def test_asynchronous_grpo(tmp_path: Path) -> None:
    log, status = trained(tmp_path, settings={}, weight_transfer_config=WeightTransferConfig(backend="gloo"))
    assert sum("loss" in entry for entry in log) == STEPS
    # The first sync is that of the start.
    assert (status["state"], status["number"]) == ("serving", STEPS + 1)


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="trl is not installed: pip install 'headrace[trl]'")
def test_asynchronous_grpo_of_an_adapter(tmp_path: Path) -> None:
    adapters = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 8}
    log, status = trained(tmp_path, "4", settings={"lora_root": tmp_path / "out"}, **adapters)
    assert sum("loss" in entry for entry in log) == STEPS
    # Adapters were sent, and no weights: the last ones are still loaded.
    assert status["number"] == 0 and f"trl-policy-v{STEPS + 1}" in status["models"]


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="trl is not installed: pip install 'headrace[trl]'")
def test_generation_on_a_server(tmp_path: Path) -> None:
    """The client of ``GRPOTrainer``, but for its updates, which it makes from GPUs alone."""
    model, stub = tmp_path / "model", tmp_path / "stub"
    write_qwen3(model)
    write_stub(stub)
    engine = EngineArgs(model=str(model), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=256, max_logprobs=-1)
    settings = ServerSettings(enable_rl_api=True, served_model_names=(str(model),))
    with running(AsyncLLM(engine), settings) as server:
        found = ran(stub, "-c", CLIENT, server.url)
    first, second = found["again"]
    assert found["completion_ids"] == [first, first, second, second], "samples are prompt-major"
    assert found["prompt_ids"] == [[5, 6, 7], [8, 9]] and len(found["chat"][0]) == 4
    assert found["logprob_token_ids"][0] == [[token] for token in first]
    [scores], [generated] = found["scores"]["actual_logprobs"], found["logprobs"][:1]
    assert found["scores"]["actual_token_ids"] == [[[token] for token in first]]
    assert [one[0] for one in scores] == pytest.approx([one[0] for one in generated], abs=1e-4)
