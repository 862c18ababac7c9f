"""MediaDecoder: decodes pictures and videos in processes with limits of time and memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.host.jobs import EndedProcess, JobProcesses, ProcessLimits
from headrace.host.turns import TenantThreads
from headrace.multimodal.decode import Decoded, DecodeJob, DecodeLimits
from headrace.multimodal.items import Picture, Video, refused

_MODULE = "headrace.multimodal.decode_worker"
Admit = Callable[[int], object]


class MediaDecoder:
    """A pool of processes, which start as jobs need them. May be used from several threads and event loops."""

    def __init__(self, limits: DecodeLimits, process: ProcessLimits, workers: int) -> None:
        self._limits = limits
        self._process_limits = process
        self._processes = JobProcesses(_MODULE, Decoded, process, "decodes pictures and videos", count=workers)
        self.threads = TenantThreads(workers, "media")

    async def image(self, data: bytes, param: str, admit: Admit = lambda size: None, tenant: str = "") -> Picture:
        """``admit``: called in a thread with the bytes of the pixels, before there is room made for them; may raise.

        Raises:
            RequestError: it is not a picture that can be decoded within the limits; names ``param``.
        """
        decoded = await self.threads.run(tenant, lambda: self._decode("image", data, param, admit))
        return Picture(np.frombuffer(decoded.pixels, np.uint8).reshape(decoded.height, decoded.width, 3))

    async def video(self, data: bytes, param: str, admit: Admit = lambda size: None, tenant: str = "") -> Video:
        """Decodes a video; see ``image``."""
        decoded = await self.threads.run(tenant, lambda: self._decode("video", data, param, admit))
        shape = (decoded.frames, decoded.height, decoded.width, 3)
        return Video(np.frombuffer(decoded.pixels, np.uint8).reshape(shape), _metadata(decoded))

    def close(self) -> None:
        """Ends the processes, once their jobs are done."""
        self.threads.close(wait=True)
        self._processes.close()

    def _decode(self, kind: Literal["image", "video"], data: bytes, param: str, admit: Admit) -> Decoded:
        for package, module in (("pillow", "PIL"), *([("av", "av")] if kind == "video" else [])):
            if importlib.util.find_spec(module) is None:
                raise refused(
                    param, f"{kind}s need the package {package}, which is not installed (pip install 'headrace[vision]')"
                )
        job = msgspec.msgpack.encode(DecodeJob(kind, self._limits, memoryview(data)))
        decoded = self._processes.call(job, admit)
        if isinstance(decoded, EndedProcess):
            limit = f"longer than {self._process_limits.seconds:g} seconds (media_decode_seconds)"
            why = (
                f"takes {limit} to decode"
                if decoded.out_of_time
                else f"cannot be decoded: it ended the decoder ({decoded.status})"
            )
            raise refused(param, why)
        if decoded.error is not None:
            raise refused(param, decoded.error)
        return decoded


def _metadata(decoded: Decoded) -> Mapping[str, Any]:
    if decoded.video is None:
        raise TypeError("a picture has no metadata of a video")
    size = {"width": decoded.width, "height": decoded.height}
    return msgspec.structs.asdict(decoded.video) | size | {"do_sample_frames": False}
