"""Deployment on a Ray cluster, as an application of Ray Serve. Needs ``ray[serve]``, which is imported on use alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_openai_app(config: Mapping[str, Any]) -> Any:
    """An application of Ray Serve: replicas of headrace on any number of hosts behind one OpenAI-compatible endpoint.

    Args:
        config: the fields of ``headrace.deploy.config.DeployConfig``.

    Raises:
        ConfigError: a field or a value in it cannot work; names it.
        ImportError: Ray Serve is not installed; says how to install it.
    """
    from headrace.deploy.config import DeployConfig

    checked = DeployConfig.of(config)
    try:
        from headrace.deploy import ray_serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ImportError("headrace.deploy needs Ray Serve: pip install 'headrace[ray]'") from error
    return ray_serve.application(checked)
