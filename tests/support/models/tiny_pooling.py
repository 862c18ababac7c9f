"""Tiny random Qwen3 models that embed and score, with the files that describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from support.models.tiny_llama import BOS, EOS, write_config

WIDTH = 64
START, END, YES, NO = 258, 259, 260, 261
NAN = 250
"""A token whose embedding is NaN in every model of ``write_pooling_model``."""
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_KINDS = {
    "Qwen3Model": AutoModel,
    "Qwen3ForCausalLM": AutoModelForCausalLM,
    "Qwen3ForSequenceClassification": AutoModelForSequenceClassification,
}


def write_pooling_config(folder: Path, architecture: str = "Qwen3ForCausalLM", **changes: Any) -> Path:
    """Config and tokenizer, which ends texts and pairs with <eos> and knows the markers of chats and the words yes and no."""
    qwen = {"architectures": [architecture], "model_type": "qwen3", "pad_token_id": BOS}
    write_config(folder, **qwen | changes)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["yes", "no"])
    backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", EOS)]
    )
    backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<bos>"}))
    return folder


def write_modules(folder: Path, mode: str = "lasttoken", *, normalize: bool = True, **settings: Any) -> Path:
    """The files of a sentence-transformers embedder."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"embedding_dimension": WIDTH, "pooling_mode": mode, "include_prompt": settings.pop("include_prompt", True)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if normalize:
        (folder / "2_Normalize").mkdir(exist_ok=True)
    own = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own | settings))
    return folder


def write_logit_score(folder: Path, **ids: int | None) -> Path:
    """The files of a sentence-transformers reranker that scores by tokens."""
    kinds = [("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO} | ids))
    return folder


def write_pooling_model(folder: Path, architecture: str = "Qwen3ForCausalLM", **changes: Any) -> PreTrainedModel:
    """Writes a model with random weights, and returns it."""
    write_pooling_config(folder, architecture, **changes)
    torch.manual_seed(0)
    model: PreTrainedModel = _KINDS[architecture].from_config(AutoConfig.from_pretrained(folder)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.2)
        model.get_input_embeddings().weight[NAN] = torch.nan
    model.save_pretrained(folder)
    write_pooling_config(folder, architecture, **changes)
    return model
