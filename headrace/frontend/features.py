"""FeatureEncoder: the vision part of a model without its text part, for features that are used elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from headrace.config import EngineArgs
from headrace.core.media import ItemInputs
from headrace.errors import ConfigError, RequestError
from headrace.models.implementation import choose
from headrace.multimodal.families import media_rules
from headrace.multimodal.items import Picture
from headrace.multimodal.media import MediaLoader
from headrace.multimodal.rules import MediaRules
from headrace.quant.registry import meaning
from headrace.resolve.facts import DecisionLog
from headrace.resolve.model import compute_dtype, gguf_types, stored_format
from headrace.sources.files import ModelFiles, find_model
from headrace.startup.environment import probe
from headrace.startup.vision import encoder_loader


def picture_rules(args: EngineArgs, files: ModelFiles) -> MediaRules | None:
    """Returns the rules by which the model reads pictures; None: it reads text alone, or has no usable processor."""
    vision = choose(args, files).spec.vision
    try:
        return None if vision is None or vision.features_only else media_rules(vision.model_type, files.directory, files.config)
    except ConfigError:
        return None


class FeatureShape(NamedTuple):
    """Shape of a picture's features in a model."""

    rows: int
    hidden_size: int
    grid: tuple[int, int, int]
    dtype: str
    deepstack_layers: int


def feature_shape(args: EngineArgs, image: Any, option: str) -> FeatureShape:
    """Returns the shape of the features of a picture, of PIL, in the model of ``args``; reads no weights.

    Raises:
        ConfigError: the model has no processor of pictures, or sees one as several items; names ``option``.
    """
    files = find_model(args)
    rules, spec = picture_rules(args, files), choose(args, files).spec
    if rules is None or spec.vision is None:
        raise ConfigError("the model has no processor of pictures", option)
    processed = rules.process(Picture(image), {}, option)
    if len(processed) != 1:
        raise ConfigError(f"the model sees {len(processed)} crops of a picture, which have no features of one", option)
    (one,) = processed
    hidden = files.config.get_text_config().hidden_size
    return FeatureShape(one.expansion.num_rows, hidden, one.grid, spec.dtype, spec.vision.deepstack_layers)


class FeatureEncoder:
    """Encodes pictures, one after the other."""

    def __init__(self, args: EngineArgs) -> None:
        """Raises: ConfigError: the model has no vision part, or it cannot be loaded."""
        self._args = args
        files = find_model(args)
        spec = choose(args, files).spec
        if spec.vision is None:
            raise ConfigError("the model reads text alone: it has no vision encoder", "model")
        if spec.vision.features_only:
            raise ConfigError(
                f"audio clips of {spec.vision.model_type} are not encoded here: the model takes their features", "model"
            )
        device = probe(args.device)
        types = gguf_types(files)
        asked = meaning(args.quantization, stored_format(files), types is not None, device.device)
        dtype = compute_dtype(args, asked, spec, types, device, DecisionLog(files.decisions))
        self._rules = media_rules(spec.vision.model_type, files.directory, files.config)
        encoder = encoder_loader()(files, spec.vision, dtype, device.device, args.seed)
        if encoder is None:
            raise ConfigError("the checkpoint has no weights of a vision encoder", "model")
        self._encoder = encoder

    def encode(self, pictures: Iterable[tuple[str, bytes]]) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the tensors of each picture, in the form that ``read_features`` reads.

        Args:
            pictures: names and files. All are decoded, within the limits of the arguments, before the first is encoded.

        Raises:
            RequestError: a picture cannot be decoded, or the processor refuses it; names it.
        """
        for name, picture in self._decoded(pictures):
            processed = self._rules.process(picture, {}, name)
            if len(processed) != 1:
                raise RequestError(f"{name}: the model sees {len(processed)} crops of it, which are not features of one", name)
            (one,) = processed
            ends = one.expansion.counts
            runs = tuple((sum(ends[:index]), count) for index, count in enumerate(ends))
            (found,) = self._encoder.encode([ItemInputs("image", runs, one.tensors, patches=one.patches)])
            tensors = {"features": found.features.cpu().contiguous(), "grid_thw": torch.tensor([one.grid], dtype=torch.int64)}
            if found.deepstack is not None:
                tensors["deepstack"] = found.deepstack.cpu().contiguous()
            yield tensors

    def _decoded(self, pictures: Iterable[tuple[str, bytes]]) -> list[tuple[str, Picture]]:
        loader = MediaLoader(self._args)

        async def load() -> list[tuple[str, Picture]]:
            return [(name, await loader.decoder.image(data, name)) for name, data in pictures]

        try:
            return asyncio.run(load())
        finally:
            loader.close()
