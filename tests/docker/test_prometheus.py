"""A real Prometheus, with the configuration that compose mounts, on a real server's `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.asyncio.client import connect

from tests.support.serving import TIMEOUT_S, Client, Serving, serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice

DOCKER = Path(__file__).parents[2] / "docker"
WEB, PROBE = "web-key-0123456789", "probe-key-0123456789"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (apt-get install prometheus; requirements/debian.sh)",
)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(folder: Path, port: int) -> Path:
    """The configuration, with this server as its target, in a hurry."""
    (folder / "metrics_key").write_text(PROBE)
    config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / "prometheus/alerts.yml")]
    (scrape,) = config["scrape_configs"]
    scrape["authorization"]["credentials_file"] = str(folder / "metrics_key")
    scrape["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


class Prometheus:
    def __init__(self, http: httpx.AsyncClient, port: int) -> None:
        self._http = http
        self._base = f"http://127.0.0.1:{port}"

    async def get(self, path: str, **query: str) -> Any:
        answer = await self._http.get(f"{self._base}/api/v1{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    async def query(self, expression: str) -> list[float]:
        return [float(each["value"][1]) for each in (await self.get("/query", query=expression))["result"]]

    async def until(self, expression: str) -> None:
        """Until the expression has numbers for a result: a busy machine may miss a scrape."""
        values: list[float] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not values or not all(map(math.isfinite, values)):
                    await asyncio.sleep(0.1)
                    values = await self.query(expression)
        except TimeoutError:
            pytest.fail(f"{expression} is {values}")

    async def until_ready(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self._http.get(f"{self._base}/-/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def prometheus(folder: Path, target_port: int) -> AsyncIterator[Prometheus]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = configure(folder, target_port)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            prom = Prometheus(http, port)
            await prom.until_ready()
            yield prom
    finally:
        process.terminate()
        await process.wait()


async def traffic(server: Serving) -> None:
    """A turn and a refusal about each half second, for ever; a turn is longer than what may wait."""
    url = f"ws://127.0.0.1:{server.port}/v1/stream?turn=manual&voice=on"
    headers = {"Authorization": f"Bearer {WEB}"}
    async with connect(url, additional_headers=headers, proxy=None) as connection:
        client = Client(connection)
        while True:
            for _ in range(6):
                await client.audio(pcm(1.0))
            await client.say(type="input.commit")
            await client.until("response.done")
            async with connect(url, additional_headers=headers, proxy=None) as refused:
                await Client(refused).closed()
            await asyncio.sleep(0.5)


def dashboard() -> dict[str, Any]:
    return json.loads((DOCKER / "grafana/dashboards/metronome.json").read_text())


def test_promtool_accepts_configuration_and_rules_and_the_alerts_fire_as_meant(tmp_path: Path):
    assert "SUCCESS" in promtool("check", "config", configure(tmp_path, 8000))
    assert "SUCCESS" in promtool("check", "rules", DOCKER / "prometheus/alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", DOCKER / "prometheus/alerts_test.yml")


async def test_prometheus_scrapes_and_every_rule_and_every_query_of_the_dashboard_has_data(tmp_path: Path):
    keys = f"web {WEB}, probe {PROBE} 0"
    async with serving(auth__keys=keys, max_sessions=1, tick__budget_ms=200, voice=ToneVoice()) as server:
        talking = asyncio.create_task(traffic(server))
        async with prometheus(tmp_path, server.port) as prom:
            await prom.until("metronome:tick_lateness_seconds:p99 >= 0")  # rates need several scrapes
            await prom.until("rate(metronome_engine_step_seconds_count[10s]) > 0")
            await prom.until("rate(metronome_sessions_refused_total{reason='load'}[10s]) > 0")

            for group in (await prom.get("/rules"))["groups"]:
                for rule in group["rules"]:
                    assert (rule["health"], rule.get("lastError")) == ("ok", None), rule["name"]
            for panel in dashboard()["panels"]:
                for target in panel["targets"]:
                    await prom.until(filled_in(target["expr"]))
            (annotation,) = dashboard()["annotations"]["list"]
            await prom.query(annotation["expr"])
            labels = await prom.get("/label/instance/values", **{"match[]": "metronome_info"})
            assert labels == [f"127.0.0.1:{server.port}"]  # what the dashboard's list of servers asks for
        assert not talking.done(), talking.exception()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def test_without_its_key_prometheus_sees_a_server_that_is_down(tmp_path: Path):
    async with serving(auth__keys=f"web {WEB}") as server, prometheus(tmp_path, server.port) as prom:
        await prom.until("up{job='metronome'} == 0")
        (target,) = (await prom.get("/targets"))["activeTargets"]
        assert "401" in target["lastError"]


async def test_rules_and_dashboard_use_only_what_the_server_exports():
    async with serving() as server:
        exported = set(re.findall(r"^(metronome_\w+)", (await server.get("/metrics")).text, re.M))
    written = (DOCKER / "prometheus/alerts.yml").read_text() + json.dumps(dashboard())
    assert set(re.findall(r"\bmetronome_\w+", written)) <= exported


def filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "10s").replace("$instance", ".*")
