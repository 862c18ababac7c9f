"""The heads that a checkpoint has on its layers: for next tokens, or for classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from headrace.errors import ConfigError
from headrace.sources.files import ModelFiles

CLASSIFIER = "ForSequenceClassification"
_LAYERS_ALONE = "Model"
_CAUSAL = "ForCausalLM"


@dataclasses.dataclass(frozen=True)
class Heads:
    tokens: bool
    """Whether there is an output head, its own or the token embedding."""
    classes: int = 0
    """Outputs of the classification head; 0: there is none."""


def causal_name(architecture: str) -> str:
    """Returns the causal language model with the same layers: the name itself, unless it is of a model with another head or
    with none."""
    for ending in (CLASSIFIER, _LAYERS_ALONE):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + _CAUSAL
    return architecture


def find_heads(files: ModelFiles) -> Heads:
    """Finds the heads of a model.

    Raises:
        ConfigError: the configuration names a classification head, and the checkpoint has none.
    """
    names = getattr(files.config, "architectures", None) or []
    if files.kind not in ("safetensors", "dummy") or files.gguf_file is not None:
        return Heads(tokens=True)
    if any(name.endswith(CLASSIFIER) for name in names):
        return Heads(tokens=False, classes=_num_classes(files))
    if getattr(files.config, "tie_word_embeddings", False):
        return Heads(tokens=True)
    if any(name.endswith(_LAYERS_ALONE) for name in names):
        return Heads(tokens=False)
    # Embedders are published under the name of the causal language model that they were made of, without its head.
    described = (files.directory / "modules.json").exists()
    return Heads(tokens=not described or files.kind == "dummy" or any(name == "lm_head.weight" for name, _ in _stored(files)))


def _num_classes(files: ModelFiles) -> int:
    if files.kind == "dummy":
        labels = getattr(files.config, "id2label", None) or (None, None)
        return len(labels)
    for name, shape in _stored(files):
        if name == "score.weight" and len(shape) == 2:
            return shape[0]
    raise ConfigError(
        f"{files.directory} has no score.weight [classes, width], the classification head of "
        f"{' / '.join(getattr(files.config, 'architectures', None) or ())}",
        "model",
    )


def _stored(files: ModelFiles) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors."""
    for file in files.weight_files:
        yield from _tensors(file)


def _tensors(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(file, framework="numpy") as handle:
            return [(name, tuple(handle.get_slice(name).get_shape())) for name in handle.keys()]  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "model") from error
