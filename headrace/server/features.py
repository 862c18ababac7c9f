"""FeatureStore: features of pictures, videos and audio that clients upload once and refer to many times."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.choices import Modality
from headrace.errors import RequestError
from headrace.server.errors import ApiError, shown
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from headrace.multimodal.items import Features
    from headrace.multimodal.media import FindFeatures

_OVERHEAD = 1024
"""Bytes of an upload beside its numbers."""


class Upload(NamedTuple):
    tenant: str
    modality: Modality
    features: Features
    created: float
    """Seconds since the epoch, for clients."""
    ends: float
    """Time at which it expires, by the store's clock."""

    @property
    def size(self) -> int:
        deepstack = self.features.deepstack
        return _OVERHEAD + len(self.features.rows.data) + (0 if deepstack is None else len(deepstack.data))


class FeatureStore:
    """An upload stays until its time is over or its owner deletes it. Only the API key that brought it finds it."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = settings.features_ttl
        self._share = settings.share(settings.features_bytes)
        self._clock = clock
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        """The oldest first."""
        self.used: dict[str, int] = {}
        """Bytes by tenant."""

    def __len__(self) -> int:
        return len(self._uploads)

    def put(self, tenant: str, modality: Modality, features: Features) -> str:
        """Stores features, and returns their id.

        Raises:
            ApiError: 413: it could never be kept; 429: there is no room for it now.
        """
        self._expire()
        upload = Upload(tenant, modality, features, time.time(), self._clock() + self._ttl)
        if upload.size > self._share:
            message = f"the features take {upload.size} bytes, and an API key may have {self._share} (features_bytes)"
            raise ApiError(413, message, param="data", code="features_too_large")
        used = self.used.get(tenant, 0) + upload.size
        if used > self._share:
            message = f"uploads of this API key take {used - upload.size} of {self._share} bytes (features_bytes): delete some"
            raise ApiError(429, message, param="data", code="features_full")
        identity = f"feat_{uuid.uuid4().hex}"
        self._uploads[identity] = upload
        self.used[tenant] = used
        return identity

    def get(self, tenant: str, identity: str) -> Upload | None:
        self._expire()
        upload = self._uploads.get(identity)
        return upload if upload is not None and upload.tenant == tenant else None

    def delete(self, tenant: str, identity: str) -> bool:
        """Whether it was there."""
        if self.get(tenant, identity) is None:
            return False
        self._drop(identity)
        return True

    def finder(self, tenant: str) -> FindFeatures:
        """Finds a tenant's uploads for its prompts."""

        def find(identity: str, modality: Modality, param: str) -> Features:
            upload = self.get(tenant, identity)
            if upload is None:
                message = f"{param}: there are no features {shown(identity)}: they were not uploaded here, or are forgotten"
                raise RequestError(message, param, code="features_not_found")
            if upload.modality != modality:
                message = f"{param}: the features {identity} are of {_named(upload.modality)}, not of {_named(modality)}"
                raise RequestError(message, param)
            return upload.features

        return find

    def described(self, identity: str, upload: Upload) -> dict[str, Any]:
        """The upload as clients see it."""
        features = upload.features
        return {
            "id": identity,
            "object": "features",
            "modality": upload.modality,
            "created_at": int(upload.created),
            "expires_at": int(upload.created + self._ttl),
            "bytes": upload.size,
            "dtype": features.rows.dtype,
            "num_tokens": features.rows.shape[0],
            "hidden_size": features.rows.shape[1],
            "grid_thw": list(features.grid),
            "deepstack_levels": 0 if features.deepstack is None else features.deepstack.shape[0],
        }

    def _expire(self) -> None:
        now = self._clock()
        while self._uploads:
            identity, upload = next(iter(self._uploads.items()))
            if upload.ends > now:
                return
            self._drop(identity)

    def _drop(self, identity: str) -> None:
        upload = self._uploads.pop(identity)
        self.used[upload.tenant] -= upload.size


def _named(modality: Modality) -> str:
    return {"image": "a picture", "video": "a video", "audio": "an audio clip"}[modality]
