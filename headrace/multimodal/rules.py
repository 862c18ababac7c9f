"""MediaRules: what a family of models does with pictures and videos before they reach its encoder."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from headrace.choices import Modality
from headrace.core.media import PatchLayout, TensorData
from headrace.errors import ConfigError, RequestError
from headrace.multimodal.backend import ImageProcessor
from headrace.multimodal.items import Features, Picture, Video, misfit, refused, wrong

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int, int]


class Expansion(msgspec.Struct, frozen=True):
    """Replacement of a placeholder."""

    pieces: tuple[str | int, ...]
    """Text, and numbers of feature tokens."""
    blocks: tuple[Grid, ...]
    """Tokens in time, height and width of each number in ``pieces``."""
    interval: float = 1.0
    """Positions between tokens that follow each other in time."""

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, int))

    @property
    def num_rows(self) -> int:
        return sum(self.counts)


class Processed(msgspec.Struct, frozen=True):
    """One item: a picture, a crop of one, or a video."""

    modality: Modality
    expansion: Expansion
    tensors: dict[str, TensorData]
    """Tensors of ``ItemInputs``."""
    grid: Grid
    """Grid of ``Features``."""
    encoded: bool = False
    content_hash: str = ""
    patches: PatchLayout | None = None
    """Layout of ``ItemInputs``."""


class MediaRules(abc.ABC):
    """Rules by which one model reads media. Stateless: used from several threads."""

    placeholders: Mapping[Modality, str]
    """Text that stands for a medium in a prompt; a token of the vocabulary, but for those of ``written``."""
    written: ClassVar[frozenset[Modality]] = frozenset()
    """Media whose placeholder is text that neither tokenizers nor chat templates of the model need to know."""
    feature_tokens: Mapping[Modality, str]
    """The token that takes a feature row."""
    markers: ClassVar[Mapping[Modality, tuple[str, str]]] = {}
    """Tokens before and behind the feature tokens of a medium that belong to its item, where a prompt has them."""
    timestamped: ClassVar[bool] = False
    """Prompts say the seconds of each temporal patch of a video."""
    backend: str = "none"
    """Library that resizes pictures: torchvision, or pil. They round differently."""
    fingerprint: str = ""
    """Differs where processed media would."""
    max_rows: int = 1 << 31
    """The most that an item may have: what is larger is refused before it is resized, or its tokens are laid out."""
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    """The ``mm_processor_kwargs`` that a request may give."""

    def check_rows(self, rows: int, where: str) -> None:
        """Raises RequestError for an item that no context holds."""
        if rows > self.max_rows:
            raise RequestError(
                f"{where} would take {rows} tokens, and the context has {self.max_rows}",
                where,
                code="context_length_exceeded",
            )

    def options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Checks ``mm_processor_kwargs``. Raises RequestError that names one."""
        for name, value in kwargs.items():
            where = f"mm_processor_kwargs.{name}"
            if name not in self.option_types:
                known = ", ".join(self.option_types) or "none"
                raise wrong(where, f"is not an option of this model's processor; there are: {known}")
            types = self.option_types[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise wrong(where, f"must be of type {types[0].__name__}, not {value!r}")
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value <= 1 << 31:
                raise wrong(where, f"must be above 0 and at most {1 << 31}, not {value!r}")
        return dict(kwargs)

    @abc.abstractmethod
    def process(self, medium: Picture | Video, options: Mapping[str, Any], where: str) -> list[Processed]:
        """The encoder's inputs: one item, or several that follow each other. Raises RequestError."""

    @abc.abstractmethod
    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        """Returns the replacement of the placeholder of encoded features. Raises RequestError if the grid is impossible, or too
        large."""

    @abc.abstractmethod
    def image_rows(self, width: int, height: int) -> int:
        """Feature rows of a picture."""


class PictureRules(MediaRules):
    """Rules of a model that makes one item of each picture, laid out by its grid. Subclasses may read videos too.

    Args:
        folder: of the model's files.
    """

    def __init__(self, folder: Path) -> None:
        self._images = ImageProcessor(folder)
        self.backend = self._images.backend
        self.fingerprint = self._images.fingerprint()

    def _check_size(self, made: tuple[int, int], side: int) -> None:
        """Raises ConfigError unless the processor makes what the vision tower takes. ``made``: height and width."""
        if made != (side, side):
            sizes = f"{made[1]}x{made[0]}, and the vision tower takes {side}x{side}"
            raise ConfigError(f"the image processor makes pictures of {sizes}", "model")

    def process(self, medium: Picture | Video, options: Mapping[str, Any], where: str) -> list[Processed]:
        if not isinstance(medium, Picture):
            return [self._video(medium, options, where)]
        grid = self._grid(*medium.size, where)
        expansion = self._expanded(grid)
        self.check_rows(expansion.num_rows, where)
        return [Processed("image", expansion, self._tensors(medium.image, where), grid)]

    def _video(self, video: Video, options: Mapping[str, Any], where: str) -> Processed:
        """The encoder's inputs of a video. Raises RequestError."""
        raise refused(where, "this model takes no videos")

    def expansion(self, features: Features, modality: Modality, where: str) -> Expansion:
        if expected := self._expected(features.grid):
            raise misfit(f"{where}.grid_thw", expected, list(features.grid))
        expansion = self._expanded(features.grid)
        self.check_rows(expansion.num_rows, where)
        return expansion

    def image_rows(self, width: int, height: int) -> int:
        return self._expanded(self._grid(width, height, "the picture")).num_rows

    @abc.abstractmethod
    def _grid(self, width: int, height: int, where: str) -> Grid:
        """Returns the grid of a picture. Raises RequestError for one that the model cannot take."""

    @abc.abstractmethod
    def _expanded(self, grid: Grid) -> Expansion:
        """Returns the replacement of a picture's placeholder."""

    @abc.abstractmethod
    def _expected(self, grid: Grid) -> str:
        """Returns the grid that features must have; empty: they have it."""

    def _tensors(self, image: Image, where: str) -> dict[str, TensorData]:
        """The encoder's inputs."""
        return {"pixel_values": self._images(image, where)["pixel_values"]}


class FixedRules(PictureRules):
    """Rules of a model with pictures of one grid of tokens."""

    fixed: Grid

    def _grid(self, width: int, height: int, where: str) -> Grid:
        return self.fixed

    def _expected(self, grid: Grid) -> str:
        return "" if grid == self.fixed else str(list(self.fixed))
