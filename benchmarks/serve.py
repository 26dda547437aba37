"""How fast `dsv4 serve` answers: time to the first token, between tokens, and tokens a second.

    python -m benchmarks.serve [--tokens 32] [--clients 1 8 32]

The stand-in on this machine's CPU, over loopback with httpx, next to prompts of the same length one
after another on an engine without HTTP. Prints a table and one JSON line; writes nothing. Figures
of one run on a machine that does other work say little.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import torch
import uvicorn

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.engine import Engine
from dsv4.serve.app import make_app, make_state
from dsv4.serve.models import Room, StandIn
from dsv4.serve.options import ServerOptions

PROMPT_TOKENS = 100


def prompt(nth: int) -> str:
    """No two begin alike."""
    return f"{nth:06d} ".ljust(PROMPT_TOKENS, "x")


def sequential(count: int, tokens: int) -> dict[str, float]:
    """One after another, without HTTP."""
    model = StandIn()
    room = Room(max_requests=1, max_context=2048, max_step_tokens=512, prefix=PrefixOptions())
    opened = model.open(room)
    engine = Engine(model=opened.model, manager=opened.manager)
    begun = time.perf_counter()
    for nth in range(count):
        engine.submit(model.tokenizer.encode(prompt(nth)), tokens)
        engine.run()
    return {"tokens_per_s": count * tokens / (time.perf_counter() - begun)}


def ask(url: str, nth: int, tokens: int) -> list[float]:
    """When each piece of the answer came, from the request on."""
    body = {
        "model": "stand-in",
        "prompt": prompt(nth),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,  # so that a token without whole characters is sent too
    }
    begun, times = time.perf_counter(), list[float]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - begun)
    return times


def served(url: str, clients: int, tokens: int, first: int) -> dict[str, float]:
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        found = [*threads.map(lambda nth: ask(url, first + nth, tokens), range(clients))]
    seconds = time.perf_counter() - begun
    firsts = [times[0] for times in found]
    gaps = [b - a for times in found for a, b in pairwise(times)]
    return {
        **{f"first_ms_p{p}": 1e3 * percentile(firsts, p) for p in (50, 90, 99)},
        **{f"between_ms_p{p}": 1e3 * percentile(gaps, p) for p in (50, 90, 99)},
        "tokens_per_s": clients * tokens / seconds,
    }


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"sequential": sequential(8, options.tokens)}
    state = make_state(StandIn(), ServerOptions(max_requests=32))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(state), log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    httpx.Client(transport=httpx.HTTPTransport(retries=20)).get(f"{url}/ready")
    ask(url, 999_999, 2)
    for nth, clients in enumerate(options.clients):
        results[f"{clients} clients"] = served(url, clients, options.tokens, 1000 * (nth + 1))
    server.should_exit = True
    thread.join()
    for name, found in results.items():
        shown = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
        print(f"{name:>12}: {shown}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
