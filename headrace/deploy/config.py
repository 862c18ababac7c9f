"""DeployConfig: what a user says of an application, with the names of Ray Serve's own LLM applications."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.options import nested
from headrace.server.settings import ServerSettings

_LOADING = ("model_id", "model_source")
_ROWS = {True: 64, False: 256}
"""Sequences that an engine runs at once by default, on a CPU and on a GPU."""
_QUEUED_SHARE = 8
"""A replica is sent this part of its rows beyond them, so that a row that ends has a successor."""
_TARGET = 0.75
"""Share of the rows that autoscaling aims at, as requests per replica."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeployConfig:
    engine: EngineArgs
    settings: ServerSettings
    deployment: dict[str, Any]
    """Options of the deployment of engines, the given ones and the defaults."""
    ingress: dict[str, Any]
    """Options of the deployment in front of them."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeployConfig:
        """
        Args:
            config: ``model_loading_config`` (``model_id``: the name that clients use; ``model_source``: as MODEL of the
                command line), ``engine_kwargs`` (fields of ``EngineArgs``), ``server_kwargs`` (of ``ServerSettings``),
                ``deployment_config`` and ``ingress_deployment_config`` (options of Ray Serve's deployments).

        Raises:
            ConfigError: names the field.
        """
        sections = {name: dict(value or {}) for name, value in config.items()}
        loading = sections.pop("model_loading_config", {})
        if unknown := sorted(loading.keys() - set(_LOADING)):
            raise ConfigError(f"{unknown[0]} is none of {', '.join(_LOADING)}", f"model_loading_config.{unknown[0]}")
        engine_kwargs, server_kwargs = sections.pop("engine_kwargs", {}), sections.pop("server_kwargs", {})
        if "model_source" in loading:
            engine_kwargs.setdefault("model", loading["model_source"])
        if "model_id" in loading:
            server_kwargs.setdefault("served_model_names", (loading["model_id"],))
        engine = nested(EngineArgs, engine_kwargs, "engine_kwargs")
        if engine.data_parallel_size > 1:
            raise ConfigError(
                "Ray Serve makes the replicas (deployment_config), each of them one engine: data_parallel_size must be 1",
                "engine_kwargs.data_parallel_size",
            )
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in server_kwargs.items()}
        settings = nested(ServerSettings, lists, "server_kwargs")
        given, ingress = sections.pop("deployment_config", {}), sections.pop("ingress_deployment_config", {})
        if sections:
            raise ConfigError(f"{min(sections)} is not a field of an application", min(sections))
        return cls(engine=engine, settings=settings, deployment=_deployment(given, engine, settings), ingress=ingress)


def _deployment(given: dict[str, Any], engine: EngineArgs, settings: ServerSettings) -> dict[str, Any]:
    on_cpu = engine.device == "cpu"
    rows = engine.max_num_seqs or _ROWS[on_cpu]
    options = {
        "max_ongoing_requests": rows + max(1, rows // _QUEUED_SHARE),
        # Scaling down drains a replica as a shutdown of the server does.
        "graceful_shutdown_timeout_s": settings.drain_timeout,
        "ray_actor_options": {} if on_cpu else {"num_gpus": engine.tensor_parallel_size},
    } | given
    if isinstance(scaling := options.get("autoscaling_config"), dict):
        options["autoscaling_config"] = {"target_ongoing_requests": max(1.0, _TARGET * rows)} | scaling
    return options
