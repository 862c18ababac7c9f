"""Block tables as FlashInfer takes them: the rows' blocks concatenated without gaps."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.pages import reference

gather_pages = gpu.dispatch(reference.gather_pages)
