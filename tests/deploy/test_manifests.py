"""The Dockerfile and the manifests name options, paths, extras and files that exist, and agree with each other."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from typing import Any

import pytest
import typer
import yaml
from support.pages import ROOT, blocks
from support.server.fakes import FakeLLM

from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.deploy.config import DeployConfig
from headrace.options import options
from headrace.server.app import build_app
from headrace.server.middleware import OPEN_PATHS
from headrace.server.settings import ServerSettings

DEPLOY = ROOT / "deploy"
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "headrace.yaml").read_text()))
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)$", (DEPLOY / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (one for one in KUBERNETES if one["kind"] == kind)
    return found


POD = of_kind("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command line, checked by the real command."""
    command = typer.main.get_command(app).commands[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        return {name.rpartition("__")[2]: value for name, value in context.params.items()}


def instruction(name: str) -> str:
    (text,) = (text for found, text in INSTRUCTIONS if found == name)
    return text


def test_the_command_of_the_pod_is_one() -> None:
    given = parsed(CONTAINER["args"])
    assert given["host"] == "0.0.0.0", "probes come from outside"
    assert {port["containerPort"] for port in CONTAINER["ports"]} == {given["port"]}
    ranks = (given["tensor_parallel_size"] or 1) * (given["data_parallel_size"] or 1)
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == ranks
    stop = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[0] == "sleep"
    assert POD["terminationGracePeriodSeconds"] >= int(stop[1]) + given["drain_timeout"] + 10


def test_probes_ask_what_the_server_answers_without_a_key() -> None:
    routes = build_app(FakeLLM()).openapi()["paths"]
    wanted = {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/live"}
    for probe, path in wanted.items():
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] == path and path in OPEN_PATHS and path in routes
        assert asked["port"] in {port["name"] for port in CONTAINER["ports"]}
    notes = of_kind("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/path"] in OPEN_PATHS and notes["prometheus.io/path"] in routes
    assert int(notes["prometheus.io/port"]) == CONTAINER["ports"][0]["containerPort"]


def test_the_page_shows_the_probes_of_the_manifest() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (shown,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "startupProbe" in block)
    for name, probe in yaml.safe_load(shown).items():
        assert probe["httpGet"]["path"] == CONTAINER[name]["httpGet"]["path"]


def test_the_objects_refer_to_each_other() -> None:
    deployment, service = of_kind("Deployment"), of_kind("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors.append(of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    names = {port["name"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == of_kind("PersistentVolumeClaim")["metadata"]["name"]


def test_environment_variables_are_read() -> None:
    known = {option.environment for cls in (EngineArgs, ServerSettings) for option in options(cls).values()}
    assert {variable["name"] for variable in CONTAINER["env"]} <= known


def test_the_image_holds_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [word for name, text in INSTRUCTIONS if name == "COPY" for word in text.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied) and {"pyproject.toml", "headrace"} <= set(copied)
    assert project["readme"] in copied
    extras = re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / "Dockerfile").read_text())
    assert len(extras) == 3 and {one for some in extras for one in some.split(",")} <= project["optional-dependencies"].keys()
    assert yaml.safe_load(instruction("ENTRYPOINT")) == ["tini", "--", next(iter(project["scripts"]))]
    assert parsed(yaml.safe_load(instruction("CMD")))["host"] == "0.0.0.0"
    assert int(instruction("USER")) == POD["securityContext"]["runAsUser"]
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    caches = [word.partition("=")[2] for word in shlex.split(instruction("ENV"))]
    assert all(path.split("/")[1] in {mount.strip("/") for mount in mounts} for path in caches)


SHOWN = [text for _, text in blocks(ROOT / "docs" / "deployment.md", "yaml") if "applications:" in text]


@pytest.mark.parametrize("text", [(DEPLOY / "ray" / "serve.yaml").read_text(), *SHOWN], ids=["file", "page"])
def test_the_applications_of_ray_serve_can_be_built(text: str) -> None:
    (application,) = yaml.safe_load(text)["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    config = DeployConfig.of(application["args"])
    assert config.deployment["graceful_shutdown_timeout_s"] == config.settings.drain_timeout
    assert config.deployment["autoscaling_config"]["target_ongoing_requests"] < config.deployment["max_ongoing_requests"]
