"""Kernels that need Triton, which there is for Linux only, are left out elsewhere."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*"]
