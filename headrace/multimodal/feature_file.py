"""Features of pictures, videos and audio as safetensors: read with the format's own library, after its header is bounded."""

from __future__ import annotations

from headrace.choices import Modality
from headrace.core.media import TensorData
from headrace.multimodal.items import Features, audio_features, split_features, wrong

_MAX_HEADER_BYTES = 2**16
_LENGTH_BYTES = 8
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


def read_features(data: bytes, modality: Modality, param: str) -> Features:
    """The features of one picture or video: tensors ``features``, ``grid_thw``, and where the model has them ``deepstack``,
    ``second_per_grid`` and ``timestamps``, as in ``MultiModalData.of``; of an audio clip ``features`` alone.
    ``MultiModalProcessor`` checks their numbers.

    Raises:
        RequestError: the bytes are not safetensors, or the tensors are not what they should be; names ``param`` or the tensor.
    """
    tensors = _tensors(data, param)
    if modality == "audio":
        return audio_features(tensors, param)
    grids = tensors.get("grid_thw")
    if grids is not None and len(grids.shape) == 2 and grids.shape[0] > 1:  # There may be a million.
        count = grids.shape[0]
        raise wrong(f"{param}.grid_thw", f"has {count} grids; expected one: each picture or video is a part of its own")
    (features,) = split_features(tensors, param)
    return features


def _tensors(data: bytes, param: str) -> dict[str, TensorData]:
    import safetensors

    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or size > len(data) - _LENGTH_BYTES:
        raise wrong(param, f"is not safetensors: it has {len(data)} bytes, which do not hold its header")
    if size > _MAX_HEADER_BYTES:
        raise wrong(param, f"has a header of {size} bytes; at most {_MAX_HEADER_BYTES} are allowed")
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise wrong(param, f"is not safetensors: {error}") from None
    tensors = {}
    for name, tensor in found:
        if tensor["dtype"] not in _DTYPES:
            raise wrong(f"{param}.{name[:64]}", f"has dtype {tensor['dtype']}; expected one of {', '.join(_DTYPES)}")
        tensors[name] = TensorData(_DTYPES[tensor["dtype"]], tuple(tensor["shape"]), memoryview(tensor["data"]))
    return tensors
