"""`metronome load`: many callers against a server, from as many client processes as it takes.

The parent plans, starts the processes (load_worker.py), adds up what they report, asks `/capacity`, and shows
it; it opens no session itself, so that drawing a table delays no chunk.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console
from rich.live import Live

from app import load_report, load_worker
from app.load_figures import Figures
from app.load_plan import LoadOptions, plan
from app.load_report import Capacity
from app.speaking import ClientError

CLIENTS_A_PROCESS = 100  # one core speaks for about twice as many
START_S = 3.0  # new processes import and read their share before the first call is due
ENDING_S = 20.0  # after the end: closing handshakes with a server that may not answer
CAPACITY_S = 1.0
OK, FAILED = 0, 1
"""Exit statuses; FAILED: no session could be opened for another reason than a refusal."""


def capacity_url(url: str) -> str:
    """`/capacity` of the server whose endpoint is `url`."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise ClientError(f"--url must begin with ws:// or wss://; got {url!r}")
    prefix = parts.path.partition("/v1/")[0].rstrip("/")
    return urlunsplit((scheme, parts.netloc, f"{prefix}/capacity", "", ""))


class CapacityWatch:
    """Asks `/capacity` each second on a thread of its own; a server that does not answer leaves it empty."""

    def __init__(self, options: LoadOptions) -> None:
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self._request = urllib.request.Request(capacity_url(options.url), headers=headers)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capacity", daemon=True)
        self.first: Capacity = {}
        self.last: Capacity = {}

    def __enter__(self) -> CapacityWatch:
        self._ask()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._ask()

    def _run(self) -> None:
        while not self._stop.wait(CAPACITY_S):
            self._ask()

    def _ask(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._opener.open(self._request, timeout=5) as answer:
            self.last = json.load(answer)
            self.first = self.first or self.last


@dataclass
class Workers:
    """The client processes and the last report of each."""

    begin: float
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    reports: dict[int, load_worker.Report] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return all(i in self.reports and self.reports[i].is_last for i in range(len(self.pipes)))

    def poll(self, timeout_s: float) -> None:
        """Take in what has been reported. Raises ClientError when a process died."""
        waiting = [
            p for i, p in enumerate(self.pipes) if i not in self.reports or not self.reports[i].is_last
        ]
        for ready in wait(waiting, timeout_s):
            index = self.pipes.index(ready)  # pyright: ignore[reportArgumentType]
            try:
                self.reports[index] = self.pipes[index].recv()
            except EOFError:
                raise ClientError("a client process ended unexpectedly; its error is above") from None

    def total(self) -> Figures:
        total = Figures()
        for report in self.reports.values():
            total.merge(report.figures)
        return total

    def stop(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")


@contextlib.contextmanager
def started(options: LoadOptions) -> Iterator[Workers]:
    """The client processes, which begin together; ended at the latest when the context is left."""
    speech, callers = load_worker.read_speech(options), plan(options)
    count = num_processes(options)
    context = multiprocessing.get_context("spawn")
    workers = Workers(time.monotonic() + START_S)
    try:
        for i in range(count):
            pipe, theirs = context.Pipe()
            arguments = (options, speech, callers[i::count], workers.begin, theirs)
            process = context.Process(target=load_worker.main, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            workers.processes.append(process)
            workers.pipes.append(pipe)
        yield workers
    finally:
        for process in workers.processes:
            process.join(1.0)
            if process.is_alive():
                process.terminate()
                process.join()


def num_processes(options: LoadOptions) -> int:
    """As asked, else one for each 100 clients, as far as there are cores."""
    if options.processes is not None:
        return min(options.processes, options.clients)
    return min(-(-options.clients // CLIENTS_A_PROCESS), len(os.sched_getaffinity(0)))


def run(options: LoadOptions, console: Console) -> tuple[Figures, Capacity, Capacity, float]:
    """The whole load. Ctrl-C ends it early, with the figures so far. Raises ClientError."""
    with CapacityWatch(options) as watch, started(options) as workers:
        deadline = workers.begin + options.duration_s + ENDING_S
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not workers.is_done and time.monotonic() < deadline:
                try:
                    workers.poll(0.5)
                    elapsed_s = max(0.0, time.monotonic() - workers.begin)
                    live.update(
                        load_report.live(options, workers.total(), watch.last, elapsed_s), refresh=True
                    )
                except KeyboardInterrupt:
                    workers.stop()
                    deadline = min(deadline, time.monotonic() + ENDING_S)
        elapsed_s = max(0.0, time.monotonic() - workers.begin)
        figures = workers.total()
    return figures, watch.first, watch.last, elapsed_s


def main(options: LoadOptions, json_file: Path | None, console: Console | None = None) -> int:
    """Load, show, write; gives the exit status. Raises ClientError."""
    console = console or Console()
    if json_file is not None and not json_file.parent.is_dir():
        raise ClientError(f"--json: there is no folder {json_file.parent}")
    figures, before, after, elapsed_s = run(options, console)
    console.print(load_report.final(figures, after))
    if json_file is not None:
        result = load_report.as_dict(options, figures, before, after, elapsed_s)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    return FAILED if figures.failed and not figures.accepted and not figures.refused else OK
