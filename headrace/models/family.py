"""Family: how to read a family's configurations, which modules to build, and the names of its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from headrace.model_spec import ModelSpec
from headrace.models.decoder import Decoder
from headrace.models.hf_config import HFConfig
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, as its difference from the common decoder: the defaults are the decoder's."""

    model_spec: Callable[[HFConfig], ModelSpec]
    """Reads a configuration. The registry knows the family by the spec's ``architecture``.

    Raises ConfigError for what the family does not support; names the field and the layer."""
    decoder: type[Decoder] = Decoder
    names: Callable[[Decoder], NameTable] = decoder_names
    """Returns the checkpoint names of a built model, which may be on the meta device."""
    unused: tuple[str, ...] = ()
    """Fields that change other models, and that this family's published configurations have without effect."""
    to_transformers_fields: Callable[[HFConfig], HFConfig] | None = None
    """Rewrites the published config into the fields that transformers' module reads; None: it reads the published ones.
    Raises ConfigError as ``model_spec`` does, and where transformers has no module of this model."""
