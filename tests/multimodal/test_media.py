"""The media of a conversation, from their references: URLs, files, memory, features; counts, sizes and what is in flight."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save
from support.feature_files import tensors
from support.media import clip, data_url, encoded, noise, picture

from headrace.config import EngineArgs
from headrace.errors import ConfigError, QueueFullError, RequestError
from headrace.host.channel import Channel
from headrace.multimodal.items import Features, MultiModalData, Picture, Video
from headrace.multimodal.media import MediaBudget, MediaLoader, from_base64
from headrace.text.content import MediaPart


class Responder:
    """A Fetcher of bytes that the test gives; URLs that it lacks are refused."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.fetched: list[str] = []

    async def fetch(self, url: str, param: str, charge: Callable[[int], object]) -> bytes:
        self.fetched.append(url)
        if url not in self.content:
            raise RequestError(f"{param}: not there", param)
        charge(len(self.content[url]))
        return self.content[url]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """allowed/ with files, links out of it, a pipe; beside it a file that is not allowed."""
    root = tmp_path_factory.mktemp("media")
    allowed = root / "allowed"
    (allowed / "sub").mkdir(parents=True)
    for path in (allowed / "a b.png", allowed / "sub" / "c.png", root / "secret.png", root / "allowed2.png"):
        path.write_bytes(picture())
    (allowed / "big.png").write_bytes(bytes(200_001))
    (allowed / "out.png").symlink_to(root / "secret.png")
    (allowed / "up").symlink_to(root)
    (allowed / "within.png").symlink_to(allowed / "sub" / "c.png")
    (allowed / "loop").symlink_to(allowed / "loop")
    os.mkfifo(allowed / "pipe")
    return root


@pytest.fixture(scope="module")
def fetcher() -> Responder:
    return Responder()


@pytest.fixture(scope="module")
def loader(folder: Path, fetcher: Responder) -> Iterator[MediaLoader]:
    args = EngineArgs(
        allowed_media_path=str(folder / "allowed"),
        max_media_bytes=200_000,
        max_image_pixels=100_000,
        num_video_frames=4,
        limit_mm_per_prompt={"image": 3, "video": 1},
        max_media_bytes_in_flight=2_000_000,
        media_workers=1,
    )
    loader = MediaLoader(args, fetcher)
    yield loader
    loader.close()


def load(
    loader: MediaLoader, *values: Any, modality: Any = "image", features: bool = False, find: Any = None
) -> MultiModalData:
    parts = [MediaPart(modality, value, f"messages[{index}]", features) for index, value in enumerate(values)]

    async def run() -> MultiModalData:
        async with loader.loaded(parts, find) as data:
            assert loader.budget.used or not any(isinstance(value, str) for value in values)
            return data

    try:
        return asyncio.run(run())
    finally:
        assert loader.budget.used == 0


def refused(loader: MediaLoader, *values: Any, param: str = "messages[0]", **options: Any) -> str:
    with pytest.raises(RequestError) as error:
        load(loader, *values, **options)
    assert error.value.param == param
    return error.value.message


def pixels(item: Picture | Features) -> Any:
    assert isinstance(item, Picture)
    return np.asarray(item.image)


def test_pictures_come_in_order(loader: MediaLoader, fetcher: Responder) -> None:
    fetcher.content["https://a.test/2"] = picture(seed=2)
    data = load(loader, data_url(picture(seed=1)), "https://a.test/2", Picture(noise(5, 4)))
    assert (pixels(data.images[0]) == np.asarray(noise(32, 24, seed=1))).all()
    assert (pixels(data.images[1]) == np.asarray(noise(32, 24, seed=2))).all()
    assert pixels(data.images[2]).shape == (4, 5, 3)


def test_a_picture_that_comes_twice_is_loaded_once(loader: MediaLoader, fetcher: Responder) -> None:
    fetcher.content["https://a.test/again"] = picture()
    fetcher.fetched.clear()
    data = load(loader, "https://a.test/again", "https://a.test/again")
    assert fetcher.fetched == ["https://a.test/again"]
    assert data.images[0] is data.images[1]


def test_video(loader: MediaLoader) -> None:
    (video,) = load(loader, data_url(clip(12), "video/mp4"), modality="video").videos
    assert isinstance(video, Video)
    assert video.frames.shape == (4, 48, 64, 3)
    assert video.metadata == {
        "fps": 10.0, "total_num_frames": 12, "frames_indices": [0, 4, 7, 11], "duration": 1.2,
        "width": 64, "height": 48, "do_sample_frames": False,
    }  # fmt: skip


def test_counts(loader: MediaLoader, fetcher: Responder) -> None:
    fetcher.fetched.clear()
    assert "at most 3 images" in refused(loader, *["https://a.test/x"] * 4, param="messages[3]")
    assert "at most 1 videos" in refused(loader, *["https://a.test/x"] * 2, param="messages[1]", modality="video")
    assert not fetcher.fetched


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:;base64,####",
        "data:;base64,AAA",
        "data:;base64,é",
        "ftp://a.test/",
        "/etc/passwd",
        "gopher://a",
        "AAAA",
        "data:image/png;base64,AA AA",
        "blob:abc",
        "\ud800",
    ],
)
def test_what_names_nothing(loader: MediaLoader, url: str) -> None:
    refused(loader, url)


def test_the_content_decides_what_it_is(loader: MediaLoader) -> None:
    load(loader, data_url(picture(kind="JPEG"), "text/html"))
    assert "not a picture" in refused(loader, data_url(b"<html>", "image/png"))
    assert "not a video" in refused(loader, data_url(picture(), "video/mp4"), modality="video")
    assert "not a picture" in refused(loader, data_url(clip(3)))


@pytest.mark.parametrize(
    "text", ["", "QQ==", "QUJD", "QUI=", "QUJDRA==", "QUJDREVG", "QUJDREVGR0hJSktM", "QUJDREVGR0hJSks=", "QUJDREVGR0hJSg=="]
)
@pytest.mark.parametrize("damage", ["", "=", "Q", " ", "\n", "-", "=="])
def test_base64_is_decoded_in_pieces_as_in_one(text: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.multimodal.media.BASE64_PIECE", 8)
    for at in range(len(text) + 1):
        given = text[:at] + damage + text[at:]
        expected = found = None
        if len(given) % 4 == 0:  # Python decodes some texts with too much padding.
            with contextlib.suppress(ValueError):
                expected = base64.b64decode(given, validate=True)
        try:
            found = from_base64(given, "part")
        except RequestError as error:
            assert error.param == "part" and error.message.startswith("part: is not base64")
        assert found == expected, given


def test_sizes(loader: MediaLoader) -> None:
    assert "max_media_bytes" in refused(loader, data_url(bytes(200_002)))
    assert "not a picture" in refused(loader, data_url(bytes(200_000)))


def test_files(loader: MediaLoader, folder: Path) -> None:
    allowed = folder / "allowed"
    for path in (f"{allowed}/a%20b.png", allowed / "sub" / "c.png", allowed / "within.png", f"{allowed}/sub/../sub/c.png"):
        load(loader, f"file://{path}")
    load(loader, f"file://localhost{allowed}/sub/c.png")


@pytest.mark.parametrize(
    "path",
    [
        "out.png",
        "up/secret.png",
        "../secret.png",
        "%2e%2e/secret.png",
        "../allowed2.png",
        "missing.png",
        "sub",
        "",
        "pipe",
        "loop",
        "../../../../etc/passwd",
        "a b.png%00",
        "sub/c.png?x",
        "sub/c.png#x",
    ],
)
def test_other_files_are_refused_alike(loader: MediaLoader, folder: Path, path: str) -> None:
    message = refused(loader, f"file://{folder}/allowed/{path}")
    assert "is not a file that this server may read" in message


def test_files_of_elsewhere(loader: MediaLoader) -> None:
    for url in ("file:///etc/passwd", "file:etc/passwd", "file://host/etc/passwd", "file://", "file:///proc/self/environ"):
        assert "may read" in refused(loader, url)


def test_no_file_is_read_unless_the_operator_allows_it(folder: Path) -> None:
    loader = MediaLoader(EngineArgs())
    assert "allowed_media_path" in refused(loader, f"file://{folder}/allowed/sub/c.png")
    loader.close()


def test_the_directory_must_be_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory") as caught:
        MediaLoader(EngineArgs(allowed_media_path=str(folder / "missing")))
    assert caught.value.param == "allowed_media_path"


def test_a_large_file(loader: MediaLoader, folder: Path) -> None:
    assert "max_media_bytes" in refused(loader, f"file://{folder}/allowed/big.png")


def test_objects_in_memory(loader: MediaLoader) -> None:
    data = load(loader, noise(5, 4), np.zeros((3, 2, 3), np.uint8), noise(3, 3, "RGBA"))
    assert [pixels(item).shape for item in data.images] == [(4, 5, 3), (3, 2, 3), (3, 3, 3)]
    (video,) = load(loader, np.zeros((2, 3, 4, 3), np.uint8), modality="video").videos
    assert isinstance(video, Video)
    assert "a uint8 array" in refused(loader, np.zeros((3, 2, 4), np.uint8))


def test_features(loader: MediaLoader) -> None:
    sent = {"data": base64.b64encode(save(tensors())).decode()}

    def find(reference: str, modality: str, param: str) -> Features:
        if (reference, modality) != ("feat_1", "image"):
            raise RequestError(f"{param}: there is no {reference}", param)
        return found

    (found,) = load(loader, sent, features=True).images
    assert isinstance(found, Features)
    assert load(loader, {"ref": "feat_1"}, features=True, find=find).images == (found,)
    assert "there is no feat_2" in refused(loader, {"ref": "feat_2"}, features=True, find=find, param="messages[0].ref")
    assert "no uploaded features" in refused(loader, {"ref": "feat_1"}, features=True)
    assert "not base64" in refused(loader, {"data": "?"}, features=True, param="messages[0].data")
    assert "not safetensors" in refused(loader, {"data": "AAAA"}, features=True, param="messages[0].data")


def test_features_at_urls(loader: MediaLoader, fetcher: Responder) -> None:
    content, url = save(tensors()), "https://a.test/a.safetensors"
    fetcher.content |= {url: content, "https://a.test/long": bytes(200_001), "https://a.test/other": picture()}
    (sent,) = load(loader, {"data": base64.b64encode(content).decode()}, features=True).images
    for value in ({"url": url}, url, {"url": data_url(content, "application/octet-stream")}):
        (found,) = load(loader, value, features=True).images
        assert found == sent
    assert "not there" in refused(loader, {"url": "https://a.test/none"}, features=True, param="messages[0].url")
    assert "not safetensors" in refused(loader, {"url": "https://a.test/other"}, features=True, param="messages[0].url")
    assert "not a URL of http" in refused(loader, "ftp://a.test/a", features=True)


def test_feature_urls_of_prompts(loader: MediaLoader, fetcher: Responder) -> None:
    url = "https://a.test/b.safetensors"
    fetcher.content[url] = save(tensors())
    data, parts = loader.load_features({"image_feature_urls": [url, url], "video_feature_urls": url, "other": 1})
    (video,) = data["video_embeds"]
    assert data == {"image_embeds": [video, video], "video_embeds": [video], "other": 1}
    assert [part.param for part in parts] == [
        *(f"multi_modal_data.image_feature_urls[{index}]" for index in range(2)),
        "multi_modal_data.video_feature_urls[0]",
    ]
    images = MultiModalData.of({"image_embeds": data["image_embeds"]}).images
    assert images == (video, video)
    assert loader.load_features({"image_feature_urls": [], "image": 1}) == ({"image": 1}, [])
    name = "multi_modal_data.image_feature_urls"
    for given, param, message in (
        ({"image_feature_urls": [url, "https://a.test/none"]}, f"{name}[1]", "not there"),
        ({"image_feature_urls": 5}, name, "a URL or a list of URLs, not 5"),
        ({"image_feature_urls": [url, 5]}, name, "a URL or a list of URLs"),
        ({"image_feature_urls": url, "image_embeds": {}}, name, "and image_embeds in one prompt have no order"),
        ({"image_feature_urls": [url] * 4}, f"{name}[3]", "at most 3 images"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            loader.load_features(given)
        assert caught.value.param == param


def test_features_at_private_addresses_are_refused(folder: Path) -> None:
    """The same fetcher refuses them as it refuses pictures."""
    loader = MediaLoader(EngineArgs(media_workers=1))
    try:
        for host in ("127.0.0.1", "169.254.169.254", "[::1]", "0x7f000001"):
            with pytest.raises(RequestError, match="is at an address that is not public"):
                loader.load_features({"image_feature_urls": [f"http://{host}:9/a.safetensors"]})
            assert "not public" in refused(loader, {"url": f"http://{host}:9/a"}, features=True, param="messages[0].url")
    finally:
        loader.close()


def test_one_that_fails_ends_the_others(loader: MediaLoader) -> None:
    """And the error is the request's own, not a group of errors."""
    refused(loader, data_url(picture()), "https://a.test/missing", param="messages[1]")


def test_the_budget_refuses_what_comes_beside_much_else(loader: MediaLoader) -> None:
    budget = MediaBudget(100)
    with budget.share() as first:
        first.charge(60, "a")
        with budget.share() as second, pytest.raises(QueueFullError):
            second.charge(41, "b")
        with pytest.raises(RequestError, match="a request may take 100 bytes") as caught:
            first.charge(41, "c")
        assert budget.used == 60 and caught.value.param == "c"
    with pytest.raises(QueueFullError):
        first.charge(1, "late")  # of a thread that was decoding when the request ended
    with budget.share() as third:
        third.charge(100, "d")
    assert budget.used == 0


def test_the_requests_of_one_tenant_leave_half_of_the_budget() -> None:
    budget = MediaBudget(100)
    with budget.share("one") as first, budget.share("one") as second, budget.share("two") as third:
        first.charge(40, "a")
        second.charge(10, "b")
        for share in (first, second):
            with pytest.raises(QueueFullError):
                share.charge(1, "c")
        third.charge(50, "d")
        assert budget.used == 100
    with budget.share("one") as first:
        first.charge(100, "e")
    assert budget.used == 0 and not budget.by_tenant.total()


def test_the_pictures_of_a_request_count_together(loader: MediaLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within all limits of one, and the room for its pixels is not made before they are counted."""
    made: list[int] = []
    poll = Channel.poll

    def watched(self: Channel, admit: Callable[[int], object] = lambda size: None) -> bytearray | None:
        def counted(size: int) -> None:
            admit(size)
            made.append(size)

        return poll(self, counted)

    monkeypatch.setattr(Channel, "poll", watched)
    monkeypatch.setattr(loader.budget, "most", 600_000)
    flat = [data_url(encoded(Image.new("RGB", (300, 300 + index)), "PNG")) for index in range(3)]
    assert "take more" in refused(loader, *flat)
    assert 2 * 270_000 < sum(made) < 600_000
    load(loader, *flat[:2])


def test_loading_leaves_no_threads(loader: MediaLoader) -> None:
    load(loader, data_url(picture()))
    before = threading.active_count()
    for _ in range(3):
        load(loader, data_url(picture()))
        refused(loader, data_url(b"x"))
    assert threading.active_count() <= before


def test_transparency_is_over_white(loader: MediaLoader) -> None:
    image = noise(20, 10, "RGBA")
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    assert (pixels(load(loader, data_url(encoded(image))).images[0]) == np.asarray(ground.convert("RGB"))).all()
