"""The images, compose and systemd files, as far as they can be checked and run without a Docker engine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.options import load, options
from tests.support.serving import serving

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("cpu", "cuda")


def dockerfile(image: str) -> str:
    """With continued lines joined."""
    return (DOCKER / f"Dockerfile.{image}").read_text().replace("\\\n", " ")


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def metronome_variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"\b(METRONOME_[A-Z_]+)=(\S+)", text))


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_has_nothing_to_say(image: str):
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKER / f"Dockerfile.{image}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_what_the_project_is_and_nothing_else(image: str):
    lines = (DOCKER / f"Dockerfile.{image}.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert kept == {*packages, "static", "requirements", "pyproject.toml", "README.md", "THIRD_PARTY.md"}
    for name in re.findall(r"^COPY (.*) \S+$", dockerfile(image), re.M):
        assert all((ROOT / part).exists() for part in name.split())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_pins_what_the_project_pins(image: str):
    project = (ROOT / "pyproject.toml").read_text()
    pins = (ROOT / "requirements" / f"{image}.txt").read_text() + project
    for name, version in re.findall(r"\b([a-z-]+)==(\S+)", dockerfile(image)):
        assert f"{name}=={version}" in pins
    assert f"-c requirements/{image}.txt" in dockerfile(image)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_special_and_its_options_exist(image: str, monkeypatch: pytest.MonkeyPatch):
    text = dockerfile(image)
    assert re.findall(r"^USER (.*)$", text, re.M) == ["10001"] and "--uid 10001" in text
    assert text.rstrip().endswith('CMD ["metronome", "serve"]')
    for name, value in metronome_variables(text).items():
        monkeypatch.setenv(name, value)
    settings = load()
    assert (settings.host, settings.port, settings.device) == ("0.0.0.0", 8000, image)


async def test_the_health_check_tells_a_ready_server_from_none():
    (command,) = {re.search(r'CMD \["python", "-c", "(.*)"\]', dockerfile(image))[1] for image in IMAGES}  # pyright: ignore[reportOptionalSubscript]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}

    async def status(port: int) -> int:
        code = command.replace(":8000/", f":{port}/")
        assert code != command
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        return await process.wait()

    async with serving() as server:
        assert await status(server.port) == 0
        await server.service.conductor.drain(0.0)
        assert await status(server.port) == 1
    assert await status(server.port) == 1


def test_compose_names_files_services_and_options_that_exist(monkeypatch: pytest.MonkeyPatch):
    project = compose()
    volumes, secrets = project["volumes"], project["secrets"]
    for service in project["services"].values():
        assert service["restart"] == "always"
        assert set(service.get("secrets", [])) <= set(secrets)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in volumes or (DOCKER / source).is_dir()
    server = project["services"]["metronome"]
    assert (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    cuda = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]["metronome"]
    assert (ROOT / cuda["build"]["dockerfile"]).is_file()
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load()
    assert int(server["stop_grace_period"].removesuffix("s")) > settings.drain_s + settings.close_s + 1
    assert set((DOCKER / ".gitignore").read_text().split()) == {
        "/" + secret["file"].removeprefix("./") for secret in secrets.values()
    }

    prometheus = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    (scrape,) = prometheus["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.split(":")[0] in project["services"] and target.endswith(":8000")
    assert Path(scrape["authorization"]["credentials_file"]).name in secrets
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/metronome.yml").read_text())
    folder = boards["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in project["services"]["grafana"]["volumes"]


def test_the_systemd_unit_restarts_waits_for_the_drain_and_names_options(monkeypatch: pytest.MonkeyPatch):
    text = (DOCKER / "metronome.service").read_text()
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] not in "#[")
    assert lines["Restart"] == "always" and lines["User"] == "metronome"
    known = {option.env for option in options()}
    assert set(metronome_variables(text)) - {"METRONOME_"} <= known
    drain_s = float(metronome_variables(text)["METRONOME_DRAIN_S"])
    assert float(lines["TimeoutStopSec"]) > drain_s + load().close_s + 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path):
    unit = tmp_path / "metronome.service"
    text = (DOCKER / "metronome.service").read_text()
    unit.write_text(text.replace("/opt/metronome/.venv/bin/metronome", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "metronome" in line]) == (0, [])
