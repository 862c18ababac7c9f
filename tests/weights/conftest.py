from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.kernels.native import load


@pytest.fixture(params=["native", "PyTorch's"])
def with_or_without_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second as on a machine without a compiler."""
    if request.param != "native":
        monkeypatch.setenv("HEADRACE_NATIVE", "0")
    load.cache_clear()
    yield
    load.cache_clear()
