"""The routers of trainers' routes, and what stands for them where there is no RL API."""

from __future__ import annotations

from headrace.server.routes import rl_sglang, rl_sleep, rl_vllm

TRAINERS = rl_vllm.router, rl_sglang.router, rl_sleep.router
"""Routes of --enable-rl-api."""
NO_TRAINERS = (rl_sleep.disabled,)
"""Routes without it."""
