"""Processors that the tests of this folder share."""

from __future__ import annotations

import pytest

from headrace.multimodal.processor import MultiModalProcessor

from .processing import processor


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    return processor(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    return processor(tmp_path_factory.mktemp("qwen3"), "qwen3_vl")
