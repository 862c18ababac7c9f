"""FeatureEncoder: the vision part of a model without its text part, for features that are used elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headrace.config import EngineArgs
from headrace.core.media import ItemInputs
from headrace.errors import ConfigError, RequestError
from headrace.models.implementation import choose
from headrace.multimodal.families import media_rules
from headrace.multimodal.items import Picture
from headrace.multimodal.rules import MediaRules
from headrace.resolve.facts import DecisionLog
from headrace.resolve.model import compute_dtype, gguf_types
from headrace.sources.files import ModelFiles, find_model
from headrace.startup.environment import probe
from headrace.startup.vision import encoder_loader


def picture_rules(args: EngineArgs, files: ModelFiles) -> MediaRules | None:
    """Returns the rules by which the model reads pictures; None: it reads text alone, or has no usable processor."""
    vision = choose(args, files).spec.vision
    try:
        return None if vision is None else media_rules(vision.model_type, files.directory, files.config)
    except ConfigError:
        return None


class FeatureEncoder:
    """Encodes pictures, one after the other."""

    def __init__(self, args: EngineArgs) -> None:
        """Raises: ConfigError: the model has no vision part, or it cannot be loaded."""
        files = find_model(args)
        spec = choose(args, files).spec
        if spec.vision is None:
            raise ConfigError("the model reads text alone: it has no vision encoder", "model")
        device = probe(args.device)
        dtype = compute_dtype(args, spec, gguf_types(files), device, DecisionLog(files.decisions))
        self._rules = media_rules(spec.vision.model_type, files.directory, files.config)
        encoder = encoder_loader()(files, spec.vision, dtype, device.device, args.seed)
        if encoder is None:
            raise ConfigError("the checkpoint has no weights of a vision encoder", "model")
        self._encoder = encoder

    def encode(self, pictures: Sequence[tuple[str, Picture]]) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each of some named pictures, as ``read_features`` reads them.

        Raises:
            RequestError: the processor refuses a picture; names it.
        """
        for name, picture in pictures:
            processed = self._rules.process(picture, {}, name)
            if len(processed) != 1:
                raise RequestError(f"{name}: the model sees {len(processed)} crops of it, which are no features of one", name)
            (one,) = processed
            ends = one.expansion.counts
            runs = tuple((sum(ends[:index]), count) for index, count in enumerate(ends))
            (found,) = self._encoder.encode([ItemInputs("image", runs, one.tensors, patches=one.patches)])
            tensors = {"features": found.features.cpu().contiguous(), "grid_thw": torch.tensor([one.grid], dtype=torch.int64)}
            if found.deepstack is not None:
                tensors["deepstack"] = found.deepstack.cpu().contiguous()
            yield tensors
