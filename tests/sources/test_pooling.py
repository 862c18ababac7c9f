"""What a model serves, by its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_pooling import NO, QUERY, WIDTH, YES, write_logit_score, write_modules, write_pooling_config

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.sources.files import find_model
from headrace.sources.pooling import EmbeddingConfig, PoolingConfig, ScoringConfig, find_pooling


def found(folder: Path, **args: Any) -> PoolingConfig:
    args = {"model": str(folder), "load_format": "dummy"} | args
    return find_pooling(EngineArgs(**args), find_model(EngineArgs(**args)))


def embedding(folder: Path, **args: Any) -> EmbeddingConfig:
    config = found(folder, **args).embedding
    assert isinstance(config, EmbeddingConfig)
    return config


def scoring(folder: Path, **args: Any) -> ScoringConfig:
    config = found(folder, **args).scoring
    assert isinstance(config, ScoringConfig)
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pooling_config(tmp_path / "model")


def test_a_decoder_generates_and_embeds(folder: Path) -> None:
    config = found(folder)
    assert config.generation is None and config.embedding == EmbeddingConfig() and not config.similar
    assert [line.value for line in config.decisions] == ["generate, embed", "last token, L2 norm"]


def test_an_embedders_files_are_read(folder: Path) -> None:
    write_modules(folder)
    config = embedding(folder)
    assert (config.method, config.normalize, config.described) == ("last", True, True)
    assert config.prompts == {"query": QUERY, "document": ""} and config.instruction_end == "\nQuery:"
    assert config.dimensions == range(32, WIDTH + 1)
    assert found(folder).similar and "score" in found(folder).decisions[0].value
    write_modules(folder, "mean", normalize=False, include_prompt=False, similarity_fn_name="dot", default_prompt_name="query")
    config = embedding(folder)
    assert (config.method, config.normalize, config.include_prompt) == ("mean", False, False)
    assert (config.similarity, config.default_prompt, config.dimensions) == ("dot", "query", ())


def test_older_files_name_the_mode_by_switches(folder: Path) -> None:
    write_modules(folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert embedding(folder).method == "mean"


@pytest.mark.parametrize(("mode", "why"), [("cls", "the first token sees no other"), ("max", "only lasttoken and mean are")])
def test_modes_that_causal_attention_makes_meaningless_are_refused(folder: Path, mode: str, why: str) -> None:
    write_modules(folder, mode)
    assert why in str(found(folder).embedding)
    with pytest.raises(ConfigError, match=why):
        found(folder, task="embed")


def test_other_modules_are_refused(folder: Path) -> None:
    write_modules(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "Dense" in str(found(folder).embedding)
    modules[1]["path"] = "../1_Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="not a folder of the model"):
        found(folder)


def test_attention_in_both_directions_is_refused(folder: Path) -> None:
    write_pooling_config(folder, is_causal=False)
    assert "both directions" in str(found(folder).embedding)


def test_matryoshka_is_said_by_the_configuration(folder: Path) -> None:
    write_modules(folder, "mean")
    write_pooling_config(folder, matryoshka_dimensions=[64, 16])
    assert embedding(folder).dimensions == [16, 64]
    write_pooling_config(folder, is_matryoshka=True)
    assert embedding(folder).dimensions == range(1, WIDTH + 1)


def test_layers_without_a_head_embed_alone(folder: Path) -> None:
    write_pooling_config(folder, "Qwen3Model", tie_word_embeddings=False)
    assert found(folder).generation == "the checkpoint has no output head"
    with pytest.raises(ConfigError, match="no output head"):
        found(folder, task="generate")


def test_classifiers(folder: Path) -> None:
    labels = {"id2label": {"0": "relevant"}}
    write_pooling_config(folder, "Qwen3ForSequenceClassification", **labels)
    assert scoring(folder) == ScoringConfig(head="classes", template="pair", num_classes=1)
    assert "classification head" in str(found(folder).embedding) and found(folder).generation is not None
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    write_pooling_config(folder, "Qwen3ForSequenceClassification", **labels, **identity)
    assert scoring(folder).activation == "none"
    write_pooling_config(folder, "Qwen3ForSequenceClassification", **labels, sbert_ce_default_activation_function="torch.Tanh")
    assert "neither Sigmoid nor Identity" in str(found(folder).scoring)


def test_qwen3_reranker_is_known_by_name_template_and_modules(folder: Path, tmp_path: Path) -> None:
    tokens = ScoringConfig(head="tokens", template="qwen3-reranker")
    assert isinstance(found(folder).scoring, str)
    assert scoring(folder, task="score") == tokens
    assert scoring(write_pooling_config(tmp_path / "Qwen3-Reranker-0.6B")) == tokens
    write_logit_score(folder)
    assert "its prompt is not Qwen3-Reranker's" in str(found(folder).scoring)
    sentence = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    (folder / "chat_template.jinja").write_text(sentence)
    assert scoring(folder).token_ids == (YES, NO)
    assert "--task embed" in str(found(folder).embedding) and embedding(folder, task="embed").method == "last"


def test_one_task_alone(folder: Path) -> None:
    config = found(folder, task="generate")
    assert config.generation is None and "--task generate" in str(config.embedding) and "--task generate" in str(config.scoring)
    assert found(folder, task="embed").generation == "--task embed was asked for"
    write_pooling_config(folder, "Qwen3Model", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="--task score"):
        found(folder, task="score")
