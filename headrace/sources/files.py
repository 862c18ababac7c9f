"""ModelFiles: where a model's files are and what they say about it, whatever kind of source they come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.config import Decision, EngineArgs
from headrace.errors import ConfigError
from headrace.options import shown
from headrace.sources import directory, embedded, hub
from headrace.sources.fields import Vocabulary, typed
from headrace.sources.locate import locate, refuse_irregular
from headrace.sources.megatron import find_megatron, is_megatron

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["safetensors", "gguf", "dummy", "megatron", "object"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that was found. Holds paths and facts, no weights, so it may travel between our processes."""

    name: str
    """Name that the user gave, or the name of the embedded default."""
    kind: Kind
    """Storage of the weights; dummy: they are not read at all; object: the model is there already."""
    directory: Path
    weight_files: list[Path]
    """Empty for dummy."""
    gguf_file: Path | None = None
    """The GGUF file that carries the tokenizer and the configuration, whatever ``kind`` is; None: ``directory`` does."""
    config: PreTrainedConfig
    generation_config: dict[str, Any]
    """``eos_token_id`` (always there: a list of ids, which may be empty), and the sampling defaults that the model's
    authors gave, under the names of ``SamplingParams``, unless neutral ones were asked for. See
    ``directory.generation_config``."""
    trust_remote_code: bool = False
    """Code that comes with the model may run."""
    decisions: tuple[Decision, ...] = ()

    @property
    def config_file(self) -> Path:
        """The file that ``config`` was read from."""
        return self.gguf_file or self.directory / "config.json"


def find_model(args: EngineArgs) -> ModelFiles:
    """Finds what ``args.model`` names: the embedded default, a GGUF file, a Hugging Face directory, or a hub id.

    Raises:
        ConfigError: there is no such model, a file of it is missing, corrupt or of a kind that is not read, or the hub
            cannot be reached. The error names the file or id.
    """
    return _with_sampling_defaults(args, _find(args))


def _with_sampling_defaults(args: EngineArgs, files: ModelFiles) -> ModelFiles:
    """Applies ``generation_config``, and says where the defaults come from."""
    eos = {"eos_token_id": files.generation_config["eos_token_id"]}
    defaults = {name: value for name, value in files.generation_config.items() if name not in eos}
    source = "the model's files"
    if not defaults and args.model is None:
        defaults, source = embedded.SAMPLING, "the example of its model card, as its files have none"
    if not defaults:
        return files
    words = ", ".join(f"{name} {shown(value)}" for name, value in defaults.items())
    decision = Decision("generation_config", words, f"sampling defaults from {source}")
    if args.generation_config == "vllm":
        defaults = {}
        decision = Decision("generation_config", "vllm", f"neutral sampling defaults were asked for, in place of {words}")
    return dataclasses.replace(files, generation_config=eos | defaults, decisions=(*files.decisions, decision))


def _find(args: EngineArgs) -> ModelFiles:
    if args.model is None:
        decision = Decision("model", embedded.NAME, "no model was named: the embedded default is served")
        return _from_gguf(args, embedded.NAME, embedded.find(), (decision,))
    path = locate(args.model)
    if path is None:
        path = hub.fetch(args.model, args.revision, args.load_format, code=args.trust_remote_code)
        args = dataclasses.replace(args, revision=None)
    return _from_directory(args, path) if path.is_dir() else _from_gguf(args, str(args.model), path)


def _from_gguf(args: EngineArgs, name: str, path: Path, decisions: tuple[Decision, ...] = ()) -> ModelFiles:
    if args.load_format == "safetensors":
        raise ConfigError(f"load_format is safetensors, but {path} is a GGUF file", "load_format")
    if args.revision is not None:
        raise ConfigError(f"revision is for models of the hub; {name} is a local file", "revision")
    from headrace.sources import gguf

    facts = gguf.read_facts(path)
    dummy = args.load_format == "dummy"
    return ModelFiles(
        name=name,
        kind="dummy" if dummy else "gguf",
        directory=path.parent,
        weight_files=[] if dummy else [path],
        gguf_file=path,
        config=facts.config,
        generation_config=facts.generation_config,
        decisions=decisions + facts.decisions,
    )


def _from_directory(args: EngineArgs, path: Path) -> ModelFiles:
    """A Hugging Face directory; or one that holds a single GGUF file and no ``config.json``."""
    name = str(args.model)
    refuse_irregular(path)
    if args.revision is not None:
        raise ConfigError(f"revision is for models of the hub; {name} is a local directory", "revision")
    if is_megatron(path) and (args.model_impl == "megatron" or not (path / "config.json").exists()):
        return _from_megatron(name, path)
    if args.load_format == "gguf" or not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(args, name, files[0])
        if files:
            raise ConfigError(f"{path} holds several GGUF files, name one: {', '.join(file.name for file in files)}", "model")
        missing = ".gguf file" if args.load_format == "gguf" else "config.json"
        raise ConfigError(f"{path} is not a model's directory: it has no {missing}", "model")
    config = directory.read_config(path, trust_remote_code=args.trust_remote_code)
    dummy = args.load_format == "dummy"
    return ModelFiles(
        name=name,
        kind="dummy" if dummy else "safetensors",
        directory=path,
        weight_files=[] if dummy else directory.weight_files(path),
        config=config,
        generation_config=directory.generation_config(path, config),
        trust_remote_code=args.trust_remote_code,
    )


def _from_megatron(name: str, path: Path) -> ModelFiles:
    """A distributed checkpoint of Megatron-core. Its tokenizer may stand beside it, in the files of Hugging Face."""
    found = find_megatron(path)
    embedding = found.tensors.get("embedding.word_embeddings.weight")
    if not embedding:
        raise ConfigError(f"{found.directory} has no embedding.word_embeddings.weight: it is not a language model", "model")
    from transformers import PreTrainedConfig

    vocab_size = typed(embedding[0], Vocabulary, found.directory, "embedding.word_embeddings.weight")
    config = PreTrainedConfig.from_dict({"vocab_size": vocab_size})
    return ModelFiles(
        name=name,
        kind="megatron",
        directory=path,
        weight_files=found.files,
        config=config,
        generation_config=directory.generation_config(path, config),
    )
