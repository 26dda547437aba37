"""What a page that watches `/cache/events` costs a decode step of `dsv4 serve`, by counting.

    python -m benchmarks.serve_watch
    python -m benchmarks.serve_watch --table      # what docs/serve.md has

A difference of two times is lost in noise on a busy machine: it is a few thousandths. So the work
that a watcher causes is measured itself, in processor time of the thread that does it: `step` is
all that the thread that steps does for eight requests of the demo model, `event` what it does for
watchers (also in steps that send nothing), and `sent` what the event loop does with one event.
Appends to benchmarks/results/serve_watch.jsonl.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from benchmarks.serve import ROOT, environment, wait_for, where
from dsv4.serve import process
from dsv4.serve.app import make_state
from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions
from dsv4.serve.state import ServerState

RESULTS = ROOT / "benchmarks" / "results" / "serve_watch.jsonl"
REQUESTS = 8
WAIT_S = 600.0


@contextmanager
def server() -> Iterator[tuple[str, ServerState, Callable[[], float]]]:
    """Its address, its state, and the processor time of its event loop so far."""
    state = make_state(ServedDemo(), ServerOptions(max_requests=REQUESTS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = uvicorn.Server(process.config(state))
        thread = threading.Thread(target=found.run, args=([listener],), daemon=True)
        thread.start()
        url = wait_for(process.address(listener))
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        try:
            yield url, state, lambda: time.clock_gettime(clock)
        finally:
            found.should_exit = True
            thread.join(WAIT_S)


def counted(steps: int, sends: int) -> dict[str, Any]:
    """Of `steps` steps with a watcher; an event's way to it, of `sends` ones."""
    with server() as (url, state, _), watched(url):
        spent = Spent(state)
        talkers = [threading.Thread(target=talk, args=(url, nth)) for nth in range(REQUESTS)]
        for talker in talkers:
            talker.start()
        spent.measure(steps)
        state.runner.drain()  # the talkers' next requests are refused
        for job in tuple(state.runner.engine.jobs):
            state.runner.cancel(job)
        for talker in talkers:
            talker.join(WAIT_S)
        state.runner._is_draining = False
    sent_us = sending(spent.largest, sends)
    step_us, event_us = 1e6 * spent.step_s / steps, 1e6 * spent.event_s / spent.events
    extra = spent.events / steps * (event_us + sent_us)
    return {
        "steps": steps,
        "events": spent.events,
        "step_us": round(step_us, 1),
        "event_us": round(event_us, 1),
        "sent_us": round(sent_us, 1),
        "percent": round(100 * extra / step_us, 3),
    }


class Spent:
    """Processor time of the thread that steps: all of it, and what is for watchers."""

    def __init__(self, state: ServerState) -> None:
        self.step_s = self.event_s = 0.0
        self.events = self.steps = 0
        self.largest: dict[str, Any] = {}
        self._state, self._is_over = state, threading.Event()
        self._live = state.live

    def measure(self, steps: int) -> None:
        live, hear, send = self._live, self._state.runner.after_step, self._live._send
        after = live._after_step
        begun_s = 0.0

        def note(event: dict[str, Any]) -> None:
            self.events += 1
            if len(event["requests"]) == REQUESTS:
                self.largest = event
            send(event)

        def timed() -> None:
            nonlocal begun_s
            if len(self._state.runner.engine.running) < REQUESTS and not self.steps:
                return  # it begins when all run
            begun = time.thread_time()
            if not self.steps:
                begun_s = begun
            if self.steps < steps:
                self.steps += 1
                after()
                self.event_s += time.thread_time() - begun
            elif not self._is_over.is_set():
                self.step_s = begun - begun_s - self.event_s
                self._is_over.set()

        live._send = note  # type: ignore[method-assign]
        hear[hear.index(after)] = timed
        if not self._is_over.wait(WAIT_S):
            raise TimeoutError(f"{self.steps} of {steps} steps within {WAIT_S:g} s")


def sending(event: dict[str, Any], sends: int) -> float:
    """Microseconds of the event loop for one event to one watcher, with nothing else to do."""
    with server() as (url, state, loop_s), watched(url):
        state.runner.call(lambda: None).result(WAIT_S)
        begun = loop_s()
        for _ in range(sends):
            state.live._send(event)
            time.sleep(0.002)  # each alone, as they come
        return 1e6 * (loop_s() - begun) / sends


@contextmanager
def watched(url: str) -> Iterator[None]:
    """With a client that reads all events."""
    ready, enough = threading.Event(), threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{url}/cache/events", timeout=WAIT_S) as events:
            for _ in events.iter_raw():
                ready.set()
                if enough.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    ready.wait(WAIT_S)
    try:
        yield
    finally:
        enough.set()  # one comes each second at least
        reader.join(WAIT_S)


def talk(url: str, nth: int) -> None:
    body = {"model": ServedDemo.name, "prompt": f"{nth} x" * 40, "max_tokens": 3000}
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json=body | {"ignore_eos": True, "stream": True},
        timeout=600,
    ) as answer:
        for _ in answer.iter_raw():
            pass


def sentence(row: dict[str, Any]) -> str:
    """For docs/serve.md."""
    return (
        f"{where(row['run'])} A step of {REQUESTS} requests took {row['step_us']:,.0f} µs of "
        f"processor time, counted over {row['steps']:,} steps. For a page that watched it made "
        f"{row['events']} events of {row['event_us']:,.0f} µs, and the event loop took "
        f"{row['sent_us']:,.0f} µs to send each: {row['percent']:.2f} % of a step.\n"
    )


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.serve_watch")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sends", type=int, default=500)
    parser.add_argument("--table", action="store_true", help="print the newest result's sentence")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.table:
        print(sentence(read()[-1]))
        return
    torch.set_num_threads(1)
    run = environment()
    row = {**counted(options.steps, options.sends), "run": run}
    print(json.dumps(row), flush=True)
    with options.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
