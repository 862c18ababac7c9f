"""The processes that decode pictures and videos: ``python -m headrace.multimodal.decode_worker SECONDS BYTES``."""

from __future__ import annotations

import warnings

import msgspec

from headrace.limited_process import ProcessLimits, serve
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


def main() -> None:
    import numpy  # noqa: F401  its memory is not a job's
    from PIL import Image, ImageOps  # noqa: F401

    for name in ("PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin", "BmpImagePlugin"):
        __import__(f"PIL.{name}")
    # The limit is that of the job, which may be above Pillow's.
    Image.MAX_IMAGE_PIXELS = None
    warnings.simplefilter("ignore")
    decoder = msgspec.msgpack.Decoder(DecodeJob)

    def answer(data: bytearray, limits: ProcessLimits) -> bytes:
        return msgspec.msgpack.encode(_decoded(decoder.decode(data), limits.memory))

    serve(answer)


if __name__ == "__main__":
    main()
