"""The processes that decode pictures and videos: ``python -m headrace.multimodal.decode_worker``."""

from __future__ import annotations

import warnings
from typing import NoReturn

import msgspec

from headrace.host.jobs import answer_jobs, read_limits
from headrace.host.parent import Parent, run
from headrace.multimodal.decode import Decoded, DecodeError, DecodeJob, decode_image, decode_video

_LONGEST_REASON = 300


def _decoded(job: DecodeJob, memory: int) -> Decoded:
    try:
        return decode_image(job.data, job.limits) if job.kind == "image" else decode_video(job.data, job.limits)
    except DecodeError as error:
        return Decoded(error=str(error))
    except MemoryError:
        return Decoded(error=f"needs more memory than {memory} bytes to decode (media_decode_memory)")
    except Exception as error:
        # Decoders raise all kinds of errors over malformed content, which is all that they are given here.
        return Decoded(error=f"cannot be decoded: {str(error)[:_LONGEST_REASON] or type(error).__name__}")


def main(parent: Parent) -> NoReturn:
    import numpy  # noqa: F401  its memory is not a job's
    from PIL import Image, ImageOps  # noqa: F401

    for name in ("PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin", "BmpImagePlugin"):
        __import__(f"PIL.{name}")
    # The limit is that of the job, which may be above Pillow's.
    Image.MAX_IMAGE_PIXELS = None
    warnings.simplefilter("ignore")
    limits, decoder = read_limits(parent), msgspec.msgpack.Decoder(DecodeJob)
    answer_jobs(parent, limits, lambda data: _decoded(decoder.decode(data), limits.memory))


if __name__ == "__main__":
    run(main)
