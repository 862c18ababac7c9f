"""PoolingConfig: the kinds of requests that a model serves, as its files describe them: generation, embeddings, scores."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.config import Decision, EngineArgs
from headrace.errors import ConfigError, listed
from headrace.options import shown
from headrace.pooling_params import PoolingMethod
from headrace.sources.fields import TokenId, read_json, typed
from headrace.sources.files import ModelFiles
from headrace.sources.heads import Heads, find_heads

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Activation = Literal["sigmoid", "none"]

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_FOLDER = re.compile(r"[\w.-]*")
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_METHODS: dict[str, PoolingMethod] = {"lasttoken": "last", "mean": "mean"}
_INSTRUCTED = re.compile(r"Instruct: .*(\nQuery: ?)", re.DOTALL)
"""A prompt that holds an instruction, which a request may replace."""
_JUDGES = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
"""A sentence of Qwen3-Reranker's prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Treatment of a text whose embedding is computed."""

    method: PoolingMethod = "last"
    normalize: bool = True
    include_prompt: bool = True
    """Whether a mean counts the tokens of a prompt before the text."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts that go before a text, by name."""
    default_prompt: str | None = None
    """Name of the one that is used where a request names none."""
    similarity: Similarity = "cosine"
    dimensions: Sequence[int] = ()
    """Numbers of dimensions to which an embedding may be cut; empty: the model was not trained for that."""
    described: bool = False
    """Whether the model's files describe it; False: it is what suits a decoder."""

    @property
    def instruction_end(self) -> str | None:
        """Text between an instruction and the query; None: the model takes no instructions."""
        match = _INSTRUCTED.fullmatch(self.prompts.get("query", ""))
        return None if match is None else match[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Treatment of a pair of texts that is scored."""

    head: Literal["classes", "tokens"]
    template: Literal["qwen3-reranker", "pair"]
    """pair: the tokenizer joins the two texts."""
    num_classes: int = 0
    token_ids: tuple[int, ...] = ()
    """Tokens that say yes and, if there are two, no; empty: the ids of the words are the tokenizer's."""
    activation: Activation = "sigmoid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """The kinds of requests that a model serves. A string is the reason why it does not serve one."""

    generation: str | None = None
    """Reason for which nothing is generated; None: text is."""
    embedding: EmbeddingConfig | str = EmbeddingConfig()
    scoring: ScoringConfig | str = "its files name no classification head and no tokens that say yes and no"
    decisions: tuple[Decision, ...] = ()

    @property
    def similar(self) -> bool:
        """Whether a score is the similarity of two embeddings, of a model that was made for that."""
        return isinstance(self.scoring, str) and isinstance(self.embedding, EmbeddingConfig) and self.embedding.described


def find_pooling(args: EngineArgs, files: ModelFiles) -> PoolingConfig:
    """Decides what a model serves, from its files and ``--task``.

    Raises:
        ConfigError: the model cannot do the task; or one of the files says something that is not read.
    """
    task, heads = args.task, find_heads(files)
    generation = None if heads.tokens else "the checkpoint has no output head"
    if task == "generate":
        if generation is not None:
            raise ConfigError(f"--task generate: {generation}", "task")
        why = "--task generate was asked for"
        return _decided(PoolingConfig(embedding=why, scoring=why), "asked for")
    described = files.kind in ("safetensors", "dummy") and files.gguf_file is None
    modules = _read_modules(files.directory) if described else {}
    settings = _read(files.directory / _SETTINGS) if described else {}
    scoring = _scoring(args, files, heads, modules, settings)
    embedding: EmbeddingConfig | str = _embedding(files, heads, modules, settings)
    if task == "embed":
        if isinstance(embedding, str):
            raise ConfigError(f"--task embed: {embedding}", "task")
        return _decided(PoolingConfig(generation="--task embed was asked for", embedding=embedding), "asked for")
    if task == "score":
        similar = isinstance(embedding, EmbeddingConfig) and embedding.described
        if isinstance(scoring, str) and not similar:
            raise ConfigError(f"--task score: {scoring}", "task")
        generation = "--task score was asked for"
        if isinstance(scoring, ScoringConfig):
            embedding = generation
        return _decided(PoolingConfig(generation=generation, embedding=embedding, scoring=scoring), "asked for")
    if isinstance(scoring, ScoringConfig) and isinstance(embedding, EmbeddingConfig) and not embedding.described:
        embedding = "the model was made to score pairs; --task embed serves its last hidden states nevertheless"
    return _decided(PoolingConfig(generation=generation, embedding=embedding, scoring=scoring), "what the model's files say")


def _decided(config: PoolingConfig, why: str) -> PoolingConfig:
    """Adds the decisions, for the report of the start."""
    does = [
        *(["generate"] if config.generation is None else []),
        *(["embed"] if isinstance(config.embedding, EmbeddingConfig) else []),
        *(["score"] if isinstance(config.scoring, ScoringConfig) or config.similar else []),
    ]
    lines = [Decision("task", listed(does), why)]
    if isinstance(config.embedding, EmbeddingConfig):
        own = config.embedding
        words = ["mean of all tokens" if own.method == "mean" else "last token", "L2 norm" if own.normalize else "no norm"]
        words += [f"prompts {listed(list(own.prompts))}"] if own.prompts else []
        words += [f"dimensions {own.dimensions[0]} to {own.dimensions[-1]}"] if own.dimensions else []
        source = f"{_MODULES} and the files that it names" if own.described else "no file says; it suits a decoder"
        lines.append(Decision("embedding", ", ".join(words), source))
    if isinstance(config.scoring, ScoringConfig):
        kind = f"{config.scoring.num_classes} classes" if config.scoring.head == "classes" else "the tokens yes and no"
        qwen = config.scoring.template == "qwen3-reranker"
        template = "Qwen3-Reranker's template" if qwen else "the tokenizer joins query and document"
        lines.append(Decision("score", f"{kind}, {config.scoring.activation}", template))
    elif config.similar and isinstance(config.embedding, EmbeddingConfig):
        lines.append(Decision("score", config.embedding.similarity, f"similarity of embeddings: {config.scoring}"))
    return dataclasses.replace(config, decisions=tuple(lines))


# ---------------------------------------------------------------------- files


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    return read_json(file) if file.exists() else {}


def _read_modules(folder: Path) -> dict[str, dict[str, Any]]:
    """The modules of a sentence-transformers model: kind -> configuration; empty: it is none.

    Raises:
        ConfigError: ``modules.json`` or a file that it names cannot be read.
    """
    file = folder / _MODULES
    if not file.exists():
        return {}
    # It is a list, which read_json does not take.
    listed_modules = typed(_json_list(file), list[dict[str, Any]], file, "modules")
    found = {}
    for module in listed_modules:
        kind = typed(module.get("type", ""), str, file, "type").rpartition(".")[2]
        path = typed(module.get("path", ""), str, file, "path")
        if not _FOLDER.fullmatch(path):
            raise ConfigError(f"{file}: path {shown(path)} is not a folder of the model", "model")
        found[kind] = _read(folder / path / "config.json") if path else {}
    return found


def _json_list(file: Path) -> Any:
    import json

    try:
        return json.loads(file.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "model") from error


# ---------------------------------------------------------------------- embeddings


def _embedding(
    files: ModelFiles, heads: Heads, modules: Mapping[str, dict[str, Any]], settings: Mapping[str, Any]
) -> EmbeddingConfig | str:
    if heads.classes:
        return "the model has a classification head, and scores pairs of texts"
    config = files.config.get_text_config()
    if getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", False):
        return "the model attends in both directions, and headrace computes causal attention"
    if "LogitScore" in modules:
        return EmbeddingConfig()
    if "Pooling" not in modules:
        return EmbeddingConfig()
    if unknown := sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"}):
        return f"{_MODULES} names {listed(unknown)}, which is not computed here"
    method = _method(modules["Pooling"])
    if method not in _METHODS:
        why = "the first token sees no other" if method == "cls" else "only lasttoken and mean are"
        return f"pooling by {method} is not served for a model whose attention is causal: {why}"
    file = files.directory / _SETTINGS
    prompts = typed(settings.get("prompts") or {}, dict[str, str], file, "prompts")
    default = typed(settings.get("default_prompt_name"), str | None, file, "default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name {shown(default)} is not among its prompts", "model")
    own = EmbeddingConfig(
        method=_METHODS[method],
        normalize="Normalize" in modules,
        include_prompt=typed(modules["Pooling"].get("include_prompt", True), bool, file, "include_prompt"),
        prompts=prompts,
        default_prompt=default,
        similarity=typed(settings.get("similarity_fn_name") or "cosine", Similarity, file, "similarity_fn_name"),
        described=True,
    )
    return dataclasses.replace(own, dimensions=_dimensions(files, own))


def _method(pooling: Mapping[str, Any]) -> str:
    mode = pooling.get("pooling_mode")
    modes = [name for key, name in _LEGACY_MODES.items() if pooling.get(key)] if mode is None else mode
    modes = [modes] if isinstance(modes, str) else modes
    return " and ".join(map(str, modes)) if modes else "mean"


def _dimensions(files: ModelFiles, own: EmbeddingConfig) -> Sequence[int]:
    """The numbers of dimensions for which a Matryoshka model was trained."""
    config = files.config.get_text_config()
    width: int = config.hidden_size
    given = getattr(config, "matryoshka_dimensions", None)
    if given:
        return sorted(typed(given, list[int], files.config_file, "matryoshka_dimensions"))
    if getattr(config, "is_matryoshka", False):
        return range(1, width + 1)
    # Qwen3-Embedding says so in its model card alone.
    qwen = config.model_type == "qwen3" and own.method == "last" and own.instruction_end is not None
    return range(min(32, width), width + 1) if qwen else ()


# ---------------------------------------------------------------------- scores


def _scoring(
    args: EngineArgs, files: ModelFiles, heads: Heads, modules: Mapping[str, dict[str, Any]], settings: Mapping[str, Any]
) -> ScoringConfig | str:
    qwen = _is_qwen3_reranker(files)
    activation = _activation(settings, files.config)
    if activation is None:
        return f"the activation function that {_SETTINGS} or config.json names is neither Sigmoid nor Identity"
    if heads.classes:
        template: Literal["qwen3-reranker", "pair"] = "qwen3-reranker" if qwen else "pair"
        return ScoringConfig(head="classes", template=template, num_classes=heads.classes, activation=activation)
    if not heads.tokens:
        return "the checkpoint has no output head"
    if (score := modules.get("LogitScore")) is not None:
        file = files.directory / _MODULES
        ids = [typed(score.get(f"{word}_token_id"), TokenId | None, file, f"{word}_token_id") for word in ("true", "false")]
        if ids[0] is None:
            raise ConfigError(f"{file}: its LogitScore has no true_token_id", "model")
        if not qwen and args.task != "score":
            return "its prompt is not Qwen3-Reranker's, which alone is known; --task score uses that one"
        known = tuple(token for token in ids if token is not None)
        return ScoringConfig(head="tokens", template="qwen3-reranker", token_ids=known, activation=activation)
    if qwen or (args.task == "score" and "Pooling" not in modules):
        return ScoringConfig(head="tokens", template="qwen3-reranker", activation=activation)
    return "its files name no classification head and no tokens that say yes and no"


def _is_qwen3_reranker(files: ModelFiles) -> bool:
    """Whether a model is Qwen3-Reranker by its template, or by its name: it was first published without a template."""
    if getattr(files.config, "model_type", "") != "qwen3":
        return False
    if "qwen3-reranker" in Path(files.name).name.lower():
        return True
    known = (files.directory / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return any(_JUDGES in file.read_text("utf-8", "replace") for file in known if file.exists())


def _activation(settings: Mapping[str, Any], config: Any) -> Activation | None:
    """The function that makes a score of a logit; None: it is not known."""
    of_config = getattr(config, "sentence_transformers", None)
    names = (
        settings.get("activation_fn"),
        of_config.get("activation_fn") if isinstance(of_config, dict) else None,
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    given = next((str(name) for name in names if name), "Sigmoid").rpartition(".")[2]
    return {"Sigmoid": "sigmoid", "Identity": "none"}.get(given)  # type: ignore[return-value]
