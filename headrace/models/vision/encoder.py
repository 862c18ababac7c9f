"""TransformersEncoder: the vision part of a model, by transformers' own modules, loaded with the checkpoint's weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from headrace.core.media import ItemInputs, PatchLayout
from headrace.errors import ConfigError
from headrace.model_spec import VisionSpec
from headrace.models.capture import one_line
from headrace.models.quiet import quiet_loading
from headrace.models.vision.interface import CALL_ROWS, VISION_NAME, EncodedItem, device_tensor
from headrace.models.vision.varlen import can_use_varlen, geometry, use_varlen
from headrace.quant.formats.find import find_scheme
from headrace.sources.files import ModelFiles
from headrace.sources.plain_config import in_transformers
from headrace.weights.scaled import read_floats


def patches_of(frames: torch.Tensor, layout: PatchLayout, dtype: torch.dtype) -> torch.Tensor:
    """The patches that the image processors of Qwen's models make, bit for bit: a value's shade is looked up, not computed.

    Args:
        frames: ``[n, height, width, 3]`` uint8, of whole merged patches.

    Returns:
        ``[temporal patches * rows * columns, 3 * frames of a patch * patch_size ** 2]``, merged patches one after the other.
    """
    side, merge, time = layout.patch_size, layout.merge_size, layout.temporal_patch_size
    shades = device_tensor(layout.shades, frames.device).to(dtype)
    places = frames.int().add_(torch.arange(0, shades.numel(), shades.shape[1], dtype=torch.int32, device=frames.device))
    pixels = shades.view(-1).index_select(0, places.view(-1)).view(frames.shape)
    if missing := -len(pixels) % time:
        pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    _, height, width, _ = pixels.shape
    blocks = (height // (side * merge), merge, side, width // (side * merge), merge, side)
    # From [time, frame, row, row of block, y, column, column of block, x, colour].
    patches = pixels.view(-1, time, *blocks, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(-1, 3 * time * side * side)


_GRIDS = "image_grid_thw"
_VIDEO_GRIDS = "video_grid_thw"
"""An input of encoders that compute videos in another way than pictures."""
_FEW_TOKENS = 8
"""Vocabulary of the text part that transformers builds beside the vision part, and that is thrown away."""


class TransformersEncoder:
    """Encodes the inputs that the model's processor makes of pictures and videos.

    Args:
        parts: transformers' module with ``get_image_features``.
        one_by_one: each item has a separate call, so that its features do not depend on the items beside it: matrix products
            may round a row differently with the number of rows. A CPU gains nothing by larger calls.
    """

    def __init__(self, parts: nn.Module, dtype: torch.dtype, device: torch.device, *, one_by_one: bool = False) -> None:
        self._parts, self._dtype, self._device = parts, dtype, device
        self._one_by_one = one_by_one or device.type == "cpu"
        tower = getattr(parts, "visual", None)
        self._tower: nn.Module | None = None
        """The tower that computes all segments at once."""
        if tower is not None and can_use_varlen(tower, dtype, device):
            use_varlen(tower)
            self._tower = tower

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.weights())

    def weights(self) -> list[torch.Tensor]:
        return list(self._parts.parameters())

    @torch.inference_mode()
    def encode(self, items: Sequence[ItemInputs]) -> list[EncodedItem]:
        """Encodes several items, those of equal geometry in one call. Attention in the encoders stays inside an item."""
        groups: dict[object, list[int]] = {}
        for index, item in enumerate(items):
            shapes = tuple(
                # Patches have one shape, whatever the size of the frames that they are made of.
                (name, tensor.dtype, () if tensor.dtype == "uint8" and item.patches is not None else tensor.shape[1:])
                for name, tensor in sorted(item.tensors.items())
            )
            groups.setdefault(shapes, []).append(index)
        most = 1 if self._one_by_one else CALL_ROWS
        found: dict[int, EncodedItem] = {}
        for members in groups.values():
            for call in _calls(members, [items[index].num_rows for index in members], most):
                found.update(zip(call, self._encode([items[index] for index in call]), strict=True))
        return [found[index] for index in range(len(items))]

    def _encode(self, items: Sequence[ItemInputs]) -> list[EncodedItem]:
        inputs: dict[str, Any] = {
            name: _joined([self._tensor(item, name) for item in items])
            for name in items[0].tensors
            if self._tower is None or name != _GRIDS
        }
        if self._tower is not None:
            grids = torch.cat([device_tensor(item.tensors[_GRIDS], torch.device("cpu")) for item in items])
            inputs |= {_GRIDS: grids, **geometry(self._tower, grids, self._device)}
        encode = self._parts.get_video_features if _VIDEO_GRIDS in inputs else self._parts.get_image_features
        out = encode(**inputs)  # type: ignore[operator]
        rows = _rows(out.pooler_output).to(self._dtype)
        counts = [item.num_rows for item in items]
        if sum(counts) != len(rows):
            raise ValueError(f"the vision encoder returned {len(rows)} rows for {sum(counts)} tokens")
        levels = getattr(out, "deepstack_features", None)
        deep = None if levels is None else torch.stack([_rows(level) for level in levels]).to(self._dtype)
        ends = list(itertools.accumulate(counts))
        return [
            # Copies, so that each is freed when its item is.
            EncodedItem(rows[end - count : end].clone(), None if deep is None else deep[:, end - count : end].clone())
            for count, end in zip(counts, ends, strict=True)
        ]

    def _tensor(self, item: ItemInputs, name: str) -> torch.Tensor:
        tensor = device_tensor(item.tensors[name], self._device)
        if item.patches is not None and tensor.dtype == torch.uint8:
            return patches_of(tensor, item.patches, self._dtype)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _calls(members: Sequence[int], rows: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cuts the members before the ``most`` rows of a call are exceeded; each call has one at least."""
    call: list[int] = []
    taken = 0
    for member, count in zip(members, rows, strict=True):
        if call and taken + count > most:
            yield call
            call, taken = [], 0
        call.append(member)
        taken += count
    yield call


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates like ``torch.cat``, which would copy a single tensor too."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """``[n, hidden]`` of several items, one behind the other."""
    rows = features if isinstance(features, torch.Tensor) else _joined(features)
    return rows.reshape(-1, rows.shape[-1])


def load_encoder(
    files: ModelFiles, spec: VisionSpec, dtype: str, device: str, seed: int, *, one_by_one: bool = False
) -> TransformersEncoder | None:
    """Loads the vision part of a model; with random weights where the model's weights are dummies.

    Args:
        one_by_one: as of ``TransformersEncoder``.

    Returns:
        None: the checkpoint has the text part alone.

    Raises:
        ConfigError: transformers has no such part, or the checkpoint lacks weights of it.
    """
    config = _without_text(in_transformers(files.config))
    where, torch_dtype = torch.device(device), getattr(torch, dtype)
    try:
        factory: Any = _factory(config)
        if files.kind == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                whole = factory._from_config(config, dtype=torch_dtype)
        else:
            state = _vision_weights(files)
            if not state:
                return None
            whole = _read(factory, config, state, torch_dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers cannot build the vision part of {spec.model_type}: {one_line(error)}", "model"
        ) from error
    parts = whole if not hasattr(whole, "model") else whole.model
    parts.language_model = parts.text_model = None
    return TransformersEncoder(parts.to(where).eval().requires_grad_(False), torch_dtype, where, one_by_one=one_by_one)


def _factory(config: PretrainedConfig) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForImageTextToText._model_mapping[type(config)]


def _without_text(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with a text part of almost no weights, and floats as weights."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        vars(part).pop("quantization_config", None)
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = None
    for name, value in (("num_hidden_layers", 1), ("vocab_size", _FEW_TOKENS), ("intermediate_size", 8), ("num_experts", 1)):
        if hasattr(text, name):
            setattr(text, name, value)
    if getattr(text, "num_experts_per_tok", None):
        text.num_experts_per_tok = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        for part in (config, text):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 0)
    return config


def _vision_weights(files: ModelFiles) -> dict[str, torch.Tensor]:
    if (scheme := find_scheme(files.config)) is not None:
        return read_floats(files.weight_files, scheme, VISION_NAME.fullmatch)[0]
    state: dict[str, torch.Tensor] = {}
    for file in files.weight_files:
        with safe_open(file, framework="pt") as tensors:
            state.update({name: tensors.get_tensor(name) for name in tensors.keys() if VISION_NAME.fullmatch(name)})  # noqa: SIM118
    return state


def _read(factory: Any, config: PretrainedConfig, state: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model with its vision part's weights. transformers renames those of older checkpoints."""
    with torch.random.fork_rng(devices=[]), quiet_loading():
        model: PreTrainedModel
        model, info = factory.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    for fault, key in (
        ("lacks", "missing_keys"),
        ("has the wrong shape for", "mismatched_keys"),
        ("has a tensor that no module has a place for,", "unexpected_keys"),
    ):
        names = [str(name[0] if isinstance(name, tuple) else name) for name in info[key]]
        if at_fault := sorted(name for name in names if VISION_NAME.fullmatch(name)):
            raise ConfigError(f"the checkpoint {fault} {at_fault[0]} of the vision part", "model")
    return model
