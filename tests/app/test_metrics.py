"""`/metrics` of a server that serves, refuses, drops and fails: each figure moves with what it is about."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from app.auth import KeyInUse, NotAllowed, WrongOrigin
from app.gate import RefusalReason
from app.metrics import REASONS, Metrics
from engine.null import NullEngine
from engine.scheduler import TickSample
from tests.support.serving import TIMEOUT_S, Serving, serving
from tests.support.stage import pcm


async def scrape(server: Serving) -> dict[str, float]:
    """Samples by name, labels appended: `metronome_phase{ready}`."""
    answer = await server.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in parse(answer.text)
        for sample in family.samples
    }


async def until(server: Serving, name: str, at_least: float) -> dict[str, float]:
    async with asyncio.timeout(TIMEOUT_S):
        while (figures := await scrape(server))[name] < at_least:
            await asyncio.sleep(0.05)
    return figures


async def test_figures_of_sessions_audio_and_engine():
    async with serving(max_sessions=1) as server:
        before = await scrape(server)
        assert {before[f"metronome_sessions_refused_total{{{reason}}}"] for reason in REASONS} == {0}
        assert (before["metronome_phase{ready}"], before["metronome_phase{draining}"]) == (1, 0)
        assert before["metronome_budget_seconds"] == 2 and before["metronome_sessions_cap"] == 1
        async with server.client(turn="manual") as client, server.client() as refused:
            await refused.closed()
            for _ in range(6):
                await client.audio(pcm(1.0))
            waiting = await until(server, "metronome_input_backlog_seconds", 4.0)
            assert waiting["metronome_input_backlog_max_seconds"] == 4.0  # 2 B; two seconds were dropped
            assert waiting["metronome_sessions_active"] == 1 and waiting["metronome_sessions_free"] == 0
            await client.say(type="input.commit")
            await client.until("response.done")
            running = await until(server, "metronome_engine_step_seconds_count", 1)
            assert running["metronome_kv_blocks_used"] > 0 and running["metronome_engine_sessions"] == 1
        await server.until_empty()
        after = await scrape(server)
        assert after["metronome_sessions_admitted_total"] == 1
        assert after["metronome_sessions_refused_total{load}"] == 1
        assert after["metronome_input_audio_seconds_total"] == 6.0
        assert after["metronome_input_dropped_seconds_total"] == 2.0
        assert after["metronome_tokens_total"] == len("echo: heard 4000 ms")
        assert after["metronome_input_backlog_seconds"] == after["metronome_sessions_active"] == 0
        assert after["metronome_kv_blocks_used"] == 0 < after["metronome_kv_blocks"]
        assert after["metronome_engine_steps_total"] > 0
        assert after["metronome_event_loop_delay_seconds_count"] > 0
        assert after["process_resident_memory_bytes"] > 0


async def test_a_sample_reaches_the_histogram_and_the_misses():
    async with serving() as server:
        service = server.service
        service.on_sample(TickSample(0.0, (0.015, 0.59, 5.0), 3, num_misses=2), time.monotonic())
        figures = await scrape(server)
        assert figures["metronome_tick_lateness_seconds_count"] == 3
        assert figures["metronome_tick_lateness_seconds_bucket{0.02}"] == 1
        assert figures["metronome_tick_lateness_seconds_bucket{0.6}"] == 2  # the target is a bucket's edge
        assert figures["metronome_tick_lateness_seconds_bucket{8.0}"] == 3
        assert figures["metronome_tick_misses_total"] == 2


@pytest.mark.parametrize("budget_s", [0.08, 1.0, 2.0])
def test_buckets_follow_the_budget(budget_s: float):
    metrics = Metrics(budget_s, 0.3 * budget_s)
    (family,) = [f for f in metrics.registry.collect() if f.name == "metronome_tick_lateness_seconds"]
    edges = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert {0.3 * budget_s, budget_s} <= set(edges) and edges == sorted(edges) and len(edges) < 20
    assert edges[0] <= budget_s / 50 and edges[-2] >= 2 * budget_s


async def test_an_engine_that_died_is_counted_and_its_figures_are_gone():
    engines: list[NullEngine] = []

    def make_engine() -> NullEngine:
        engines.append(NullEngine())
        return engines[-1]

    async with serving(make_engine=make_engine) as server:
        engines[0].break_down("a bit flipped")
        figures = await until(server, "metronome_engine_failures_total", 1)
        await server.until_ready()
        assert "metronome_kv_blocks" in await scrape(server)
        assert figures["metronome_engine_failures_total"] == 1


async def test_metrics_need_the_key_and_their_labels_are_few():
    async with serving(auth__keys="probe probe-key-0123456789 0") as server:
        assert (await server.get("/metrics")).status_code == 401
        answer = await server.get("/metrics?key=probe-key-0123456789")
        labels = {name for f in parse(answer.text) for s in f.samples for name in s.labels}
        assert labels == {"le", "phase", "reason", "version", "model", "device"}


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75",
            True,
        ),
        ("application/openmetrics-text; version=newest", True),
        ("text/plain; version=newest", False),
        (";,=", False),
    ],
)
async def test_openmetrics_for_those_who_ask_whatever_else_they_ask(accept: str, is_openmetrics: bool):
    async with serving() as server, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        assert ("openmetrics" in answer.headers["content-type"]) is is_openmetrics
        families = parse_openmetrics(answer.text) if is_openmetrics else parse(answer.text)
        assert "metronome_tick_lateness_seconds" in {family.name for family in families}


async def test_audio_at_another_rate_than_declared_is_counted():
    async with serving() as server, server.client() as client:
        await client.next()
        (session,) = server.service.conductor.scheduler
        for i in range(40):  # twice as fast as real time, for four seconds of a made-up clock
            session.on_audio(pcm(0.2), 1e6 + i / 10)
        figures = await scrape(server)
        assert figures["metronome_input_rate_mismatches_total"] == 1


def test_the_reasons_are_all_that_the_code_can_count():
    counted = {*get_args(RefusalReason), NotAllowed.code, WrongOrigin.code, KeyInUse.code, "too_many_pending"}
    assert counted == set(REASONS)
