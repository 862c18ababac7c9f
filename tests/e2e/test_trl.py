"""TRL's ``AsyncGRPOTrainer``, unmodified, trains a tiny model against the server; only vLLM's helpers are replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="trl is not installed: pip install 'headrace[trl]'")
def test_asynchronous_grpo(tmp_path: Path) -> None:
    model, stub = tmp_path / "model", tmp_path / "stub"
    write_qwen3(model)
    write_stub(stub)
    args = EngineArgs(
        model=str(model),
        dtype="float32",
        device="cpu",
        num_threads=1,
        num_kv_blocks=256,
        weight_transfer_config=WeightTransferConfig(backend="gloo"),
    )
    settings = ServerSettings(enable_rl_api=True, served_model_names=(str(model),))
    with running(AsyncLLM(args), settings) as server:
        command = [sys.executable, "-m", "support.trl.program", str(model), server.url, str(tmp_path / "out"), str(STEPS)]
        path = os.pathsep.join((str(stub), str(Path(__file__).parents[1]), *filter(None, sys.path)))
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-20000:]
        log = json.loads(done.stdout.strip().splitlines()[-1])
        assert sum("loss" in entry for entry in log) == STEPS
        # The first sync is that of the start.
        status = httpx.get(f"{server.url}/weight_info").json()
        assert (status["state"], status["number"]) == ("serving", STEPS + 1)
