"""What a model family is: how its configurations are read, what is built of them and how its checkpoints name the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from headrace.models.decoder import Decoder
from headrace.models.names import decoder_names
from headrace.spec import ModelSpec
from headrace.weights.names import NameTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family, written as its difference from the common decoder: what is left out is as there."""

    architectures: tuple[str, ...]
    """As ``architectures`` in a config names them."""
    model_types: tuple[str, ...]
    """For a config that names no architecture, one that was never saved with a model: it is then the first of them."""
    model_spec: Callable[[PretrainedConfig], ModelSpec]
    """Reads a configuration. Its spec's ``architecture`` is one of the family's.

    Raises ConfigError for what it asks for and the family does not do; names the field, and the layer."""
    decoder: type[Decoder] = Decoder
    names: Callable[[Decoder], NameTable] = decoder_names
    """The checkpoint names of a model that was built; it may lie on the meta device."""
    unused: tuple[str, ...] = ()
    """Fields that change other models, which its published configurations have and nothing of it uses."""
    in_transformers_words: Callable[[PretrainedConfig], PretrainedConfig] | None = None
    """A copy of a configuration that says in the fields that transformers' own module reads what the published one says in
    others; None: it reads the published ones. Raises ConfigError as ``model_spec`` does."""

    def build(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> Decoder:
        """The model with its parameters allocated and not yet filled."""
        return self.decoder(spec, dtype, device).eval()

    def name_table(self, spec: ModelSpec) -> NameTable:
        """Checkpoint names and the parameters they fill."""
        return self.names(self.decoder(spec, torch.float32, "meta"))
