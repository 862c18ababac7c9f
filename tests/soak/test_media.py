"""Ten thousand malformed and hostile pictures, videos, URLs and features."""

from __future__ import annotations

import os

import pytest
from multimodal.test_fetch import Site
from server.test_media_fuzz import attack, site

COUNT = 10_000
__all__ = ["site"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hostile_media(site: Site) -> None:
    scale = float(os.environ.get("SOAK_SCALE", "1"))
    attack(max(1, round(COUNT * scale)), 1, site)
