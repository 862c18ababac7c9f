"""POST /v1/features, and the uploads that are kept"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.choices import MEDIA_NAMES, Modality
from headrace.errors import RequestError, missing, unknown, unsupported, wrong_type
from headrace.server.body import caller, check_content_encoding, json_object
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.features import Upload
from headrace.server.generation import cancel_on_disconnect
from headrace.server.state import Serving, ready, serving

if TYPE_CHECKING:
    from headrace.multimodal.items import Features

router = APIRouter()
_BINARY = ("application/octet-stream", "application/safetensors", "application/x-safetensors")
_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "modality": {"enum": list(MEDIA_NAMES), "default": "image"},
                        "data": {"type": "string", "description": "safetensors in base64"},
                    },
                    "required": ["data"],
                    "additionalProperties": False,
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/v1/features", openapi_extra=_SCHEMA)
async def upload(request: Request) -> Response:
    """Keeps the features of one picture, video or audio clip, safetensors, which prompts then name by their id."""
    state = ready(request)
    processor = state.llm.inputs.multimodal
    if processor is None:
        raise unsupported("data", "this model reads text alone")
    data, modality = await _given(request, state)

    def read() -> Features:
        from headrace.multimodal.feature_file import read_features

        content = _decoded(data, state.settings.max_feature_bytes) if isinstance(data, str) else bytes(data)
        features = read_features(content, modality, "data")
        processor.check_features(features, modality, "data")
        return features

    features = await cancel_on_disconnect(state, request.receive, state.llm.inputs.in_thread(caller(request).turn, read))
    identity = state.features.put(caller(request).tenant, modality, features)
    return JSON(state.features.described(identity, _kept(request, identity)))


@router.get("/v1/features/{feature_id}")
async def described(request: Request) -> Response:
    """Describes an upload."""
    identity = request.path_params["feature_id"]
    return JSON(serving(request).features.described(identity, _kept(request, identity)))


@router.delete("/v1/features/{feature_id}")
async def delete(request: Request) -> Response:
    """Forgets an upload. Requests that have begun keep it until they end."""
    identity = request.path_params["feature_id"]
    _kept(request, identity)
    serving(request).features.delete(caller(request).tenant, identity)
    return JSON({"id": identity, "object": "features", "deleted": True})


async def _given(request: Request, state: Serving) -> tuple[bytearray | str, Modality]:
    """The upload, as bytes or as base64, and what it stands for."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _BINARY:
        check_content_encoding(request)
        modality: Any = request.query_params.get("modality", "image")
        _check_modality(modality)
        body = state.bodies.features(request)
        await body.read(request)
        return body.data, modality
    fields = await json_object(request, state.settings, state.bodies, state.max_json_values)
    modality, data = fields.pop("modality", "image"), fields.pop("data", None)
    _check_modality(modality)
    if fields:
        name = shown(sorted(fields)[0])
        raise unknown(name)
    if data is None:
        raise missing("data")
    if not isinstance(data, str):
        raise wrong_type("data", "safetensors in base64")
    return data, modality


def _check_modality(modality: Any) -> None:
    if modality not in list(MEDIA_NAMES):
        raise RequestError("modality must be image, video or audio", "modality")


def _decoded(text: str, most: int) -> bytes:
    from headrace.multimodal.media import from_base64

    if len(text) > (most + 2) // 3 * 4:
        raise ApiError(413, f"data has more than {most} bytes (max_feature_bytes)", param="data", code="features_too_large")
    return from_base64(text, "data")


def _kept(request: Request, identity: str) -> Upload:
    found = serving(request).features.get(caller(request).tenant, identity)
    if found is None:
        message = f"there are no features {shown(identity)}: they were not uploaded, or are forgotten"
        raise ApiError(404, message, param="feature_id", code="features_not_found")
    return found
