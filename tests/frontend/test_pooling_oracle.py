"""Embeddings and scores compared with sentence-transformers, which reads the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny_pooling import write_logit_score, write_modules, write_pooling_config, write_pooling_model

from headrace import LLM
from headrace.frontend.pairs import INSTRUCTION

pytestmark = pytest.mark.slow

TEXTS = ["The mill", "Water boils at a hundred degrees, and mills turn " * 2, "a"]
SIZES: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 200, "max_num_batched_tokens": 48}
RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruction }}\n<Query>: {{ messages[0]['content'] }}\n<Document>: {{ messages[1]['content'] }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
).replace("{{ instruction }}", INSTRUCTION)


@pytest.fixture(scope="module")
def library() -> Any:
    """The oracle. Its import takes seconds, which no process should spend that only collects these tests."""
    return pytest.importorskip("sentence_transformers", reason="pip install 'headrace[dev]'")


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs, dtype=torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("lasttoken", {}),
        ("mean", {"include_prompt": False, "default_prompt_name": "query"}),
        ("mean", {"normalize": False, "similarity_fn_name": "euclidean"}),
    ],
    ids=["qwen3", "mean", "plain"],
)
def test_embedders(library: Any, tmp_path: Path, mode: str, settings: dict[str, Any]) -> None:
    write_pooling_model(tmp_path, "Qwen3Model", tie_word_embeddings=False)
    write_modules(tmp_path, mode, **settings)
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu")
    with LLM(str(tmp_path), **SIZES) as llm:
        for options in ({}, {"prompt_name": "query"}, {"prompt_name": "document"}):
            close([output.outputs.embedding for output in llm.embed(TEXTS, **options)], theirs.encode(TEXTS, **options))
        if mode == "lasttoken":
            truncated = library.SentenceTransformer(str(tmp_path), device="cpu", truncate_dim=32)
            ours = [output.outputs.embedding for output in llm.embed(TEXTS, dimensions=32)]
            close(ours, truncated.encode(TEXTS, normalize_embeddings=True))
        query, documents = theirs.encode(TEXTS[:1], prompt_name="query"), theirs.encode(TEXTS, prompt_name="document")
        close([output.outputs.score for output in llm.score(TEXTS[0], TEXTS)], theirs.similarity(query, documents)[0])


def test_classifiers(library: Any, tmp_path: Path) -> None:
    write_pooling_model(tmp_path, "Qwen3ForSequenceClassification", tie_word_embeddings=False, id2label={"0": "relevant"})
    (tmp_path / "chat_template.jinja").unlink()  # The library would write the pair with it.
    theirs = library.CrossEncoder(str(tmp_path), device="cpu")
    with LLM(str(tmp_path), **SIZES) as llm:
        ours = [output.outputs.score for output in llm.score("mills", TEXTS)]
    close(ours, theirs.predict([("mills", text) for text in TEXTS]))


def test_qwen3_reranker(library: Any, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True, "max_position_embeddings": 1024}
    write_pooling_model(tmp_path, **changes)
    write_pooling_config(tmp_path, **changes)
    (tmp_path / "chat_template.jinja").write_text(RERANKER + "\n")  # Jinja takes the last line break off.
    theirs = library.CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Sigmoid())
    write_logit_score(tmp_path)
    with LLM(str(tmp_path), **SIZES) as llm:
        ours = [output.outputs.score for output in llm.score("mills", TEXTS)]
    close(ours, theirs.predict([("mills", text) for text in TEXTS]))
