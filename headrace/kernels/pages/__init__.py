"""Block tables as FlashInfer takes them: the rows' blocks concatenated without gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.pages import reference

if TYPE_CHECKING:
    from headrace.kernels.pages import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

gather_pages = gpu.dispatch(reference.gather_pages, lambda: kernels.gather_pages)
