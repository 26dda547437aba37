"""How fast `dsv4 serve` answers: time to the first piece, between pieces, tokens a second.

    pip install --target DIR --no-deps accelerate psutil      # which transformers' server needs
    python -m benchmarks.serve --packages DIR --page [--clients 1 8 32]   # into docs/serve.md
    python -m benchmarks.serve --table                                  # what docs/serve.md has

In one run, with the demo model, which both sides read: `dsv4 serve` and `transformers serve` with
several clients, the engine and transformers' `generate` one question after another. Servers are
processes of their own on the same CPU as the clients, with one thread for torch. All get the same
questions, which are shorter than a block, so nothing of them is reused. Tokens are counted by the
model's tokenizer. Appends to benchmarks/results/serve.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.machine import current_commit, machine
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.engine import Engine
from dsv4.serve.demo import ServedDemo
from dsv4.serve.models import Room, decode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "serve.jsonl"
PAGE = ROOT / "docs" / "serve.md"
MODEL = Path(str(files("dsv4") / "data" / "demo_model"))
DSV4, TRANSFORMERS = "`dsv4 serve`", "`transformers serve`"
ENGINE, GENERATE = "`dsv4.engine`, one after another", "`generate`, one after another"
WATCHED = "watched"  # in old results; `benchmarks.serve_watch` measures it now
MOST_TOKENS = 96
ALONE = 16  # questions of a run without clients, and the fewest of one with them
IDLE_LOAD = 0.3  # of other processes, above which a machine is called busy
START_S = 300.0
ROUNDS = 3
PACKAGES: list[str] = []  # a directory with what transformers' server needs besides


@contextmanager
def process(*command: str, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *PACKAGES]),
    }
    started = subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@contextmanager
def dsv4_server(most: int) -> Iterator[tuple[str, str, int]]:
    """Its address, the name of its model, its process."""
    command = (sys.executable, "-m", "dsv4.cli", "serve", "--port", "0")
    options = ("--max-requests", str(most))
    with process(*command, *options, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        found = re.search(r" at (http://\S+)", server.stdout.readline())
        assert found is not None
        yield wait_for(found[1]), "dsv4-demo", server.pid


@contextmanager
def transformers_server(most: int) -> Iterator[tuple[str, str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = (str(Path(sys.executable).parent / "transformers"), "serve", "--port", str(port))
    with process(*command, "--host", "127.0.0.1", "--device", "cpu", str(MODEL)) as server:
        yield wait_for(f"http://127.0.0.1:{port}"), str(MODEL), server.pid


def wait_for(url: str) -> str:
    """Until the server answers; its address."""
    until = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return url
        except httpx.TransportError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"no answer from {url} within {START_S:g} s")
        time.sleep(0.2)


# ---- what is measured ----------------------------------------------------------------------------


def ask(url: str, model: str, question: str) -> tuple[list[float], str]:
    """When each piece of the answer came, from the request on, and the answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    begun, times, text = time.perf_counter(), list[float](), ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            said = choices[0].get("delta", {}).get("content")
            if said:
                times.append(time.perf_counter() - begun)
                text += said
    return times, text


def served(url: str, model: str, clients: int, demo: Checkpoint) -> dict[str, Any]:
    """Each client asks one question after another."""
    questions = asked(demo, max(ALONE, 2 * clients))
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        found = [*threads.map(lambda question: ask(url, model, question), questions)]
    seconds = time.perf_counter() - begun
    firsts = [times[0] for times, _ in found if times]
    gaps = [b - a for times, _ in found for a, b in pairwise(times)]
    return {
        **totals(demo, questions, [text for _, text in found], seconds),
        **{f"first_ms_p{p}": round(1e3 * percentile(firsts, p), 2) for p in (50, 90, 99)},
        **{f"between_ms_p{p}": round(1e3 * percentile(gaps, p), 2) for p in (50, 90, 99)},
    }


def asked(demo: Checkpoint, count: int) -> list[str]:
    known = [*demo.answers]
    return [known[nth % len(known)] for nth in range(count)]


def totals(
    demo: Checkpoint, questions: Sequence[str], texts: Sequence[str], seconds: float
) -> dict[str, Any]:
    tokens = sum(len(demo.tokenizer.encode(text)) for text in texts)
    return {
        "questions": len(questions),
        "right": sum(demo.answers[q] == t.strip() for q, t in zip(questions, texts, strict=True)),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def with_engine(demo: Checkpoint) -> dict[str, Any]:
    served_demo, questions, texts = ServedDemo(), asked(demo, ALONE), list[str]()
    room = Room(max_requests=1, max_context=4096, max_step_tokens=512, prefix=PrefixOptions())
    opened, words = served_demo.open(room), served_demo.tokenizer
    engine = Engine(model=opened.model, manager=opened.manager, drafts=0)
    begun = time.perf_counter()
    for question in questions:
        ids = served_demo.chat_tokens([{"role": "user", "content": question}])
        job = engine.submit(ids, MOST_TOKENS, stop_tokens=words.end_tokens)
        engine.run()
        texts.append(decode(words, [t for t in job.generated if t not in words.end_tokens]))
    return totals(demo, questions, texts, time.perf_counter() - begun)


def with_generate(demo: Checkpoint) -> dict[str, Any]:
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    model: Any = DeepseekV4ForCausalLM
    model, words = model.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    questions, texts = asked(demo, ALONE), list[str]()
    begun = time.perf_counter()
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = words.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        found = model.generate(ids, max_new_tokens=MOST_TOKENS, do_sample=False)
        texts.append(words.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return totals(demo, questions, texts, time.perf_counter() - begun)


# ---- the record ----------------------------------------------------------------------------------


def measured(clients: Sequence[int]) -> Iterator[dict[str, Any]]:
    """All take turns, `ROUNDS` times, so that other work of the machine disturbs each as much; of
    each the round with the median rate counts."""
    demo, most = Checkpoint.load(), max(clients)
    with dsv4_server(most) as (ours, our_name, _), transformers_server(most) as (their, name, _):
        servers = {DSV4: (ours, our_name), TRANSFORMERS: (their, name)}
        for url, model in servers.values():
            ask(url, model, "What is dsv4?")
        alone: dict[str, Callable[[], dict[str, Any]]] = {
            ENGINE: lambda: with_engine(demo),
            GENERATE: lambda: with_generate(demo),
        }
        yield from in_turns({(system, 1): run for system, run in alone.items()})
        for count in clients:
            yield from in_turns(
                {
                    (system, count): partial(served, url, model, count, demo)
                    for system, (url, model) in servers.items()
                }
            )


def in_turns(runs: Mapping[tuple[str, int], Callable[[], dict[str, Any]]]) -> Iterator[Any]:
    found = [[(key, run()) for key, run in runs.items()] for _ in range(ROUNDS)]
    for nth, (system, clients) in enumerate(runs):
        rounds = sorted((each[nth][1] for each in found), key=lambda row: row["tokens_per_s"])
        yield {"system": system, "clients": clients, **rounds[ROUNDS // 2]}


def environment() -> dict[str, Any]:
    return {**machine(("dsv4", "torch", "transformers")), "commit": current_commit()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the newest run, for docs/serve.md."""
    last = rows[-1]["run"]
    rows = [row for row in rows if row["run"] == last]
    lines = [
        "| | clients | to the first piece, ms: p50, p90, p99 | between pieces, ms: p50, p90, p99 "
        "| tokens a second | right answers |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["system"] == WATCHED:
            continue
        times = [
            ", ".join(f"{row[f'{kind}_ms_p{p}']:.1f}" for p in (50, 90, 99))
            if f"{kind}_ms_p50" in row
            else ""
            for kind in ("first", "between")
        ]
        right = f"{row['right']} of {row['questions']}"
        cells = (row["system"], row["clients"], *times, f"{row['tokens_per_s']:.0f}", right)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def where(run: dict[str, Any]) -> str:
    """When a run was, and on which machine, for docs/serve.md."""
    load = run["load_before"]
    busy = f"busy with other work (load {load:g} before the run)" if load > IDLE_LOAD else "idle"
    versions = ", ".join(f"{name} {found}" for name, found in run["versions"].items())
    return (
        f"Measured {run['date']} at commit {run['commit']} on {run['cores']} cores "
        f"({run['processor']}), {busy}; {versions}."
    )


def paragraph(rows: Sequence[dict[str, Any]]) -> str:
    """Where the newest run was, for docs/serve.md."""
    return f"{where(rows[-1]['run'])}\n"


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """What docs/serve.md has of the newest run."""
    return f"{paragraph(rows)}\n{table(rows)}"


def write_page(old: str, new: str) -> None:
    """Raises ValueError if the page does not have the old text."""
    text = PAGE.read_text(encoding="utf-8")
    if old not in text:
        raise ValueError(f"{PAGE} does not have the figures of the last run: write {new!r} there")
    PAGE.write_text(text.replace(old, new), encoding="utf-8")


def read(results: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.serve")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--packages", type=Path, help="a directory with accelerate and psutil")
    parser.add_argument("--table", action="store_true", help="print the table of the newest run")
    parser.add_argument("--page", action="store_true", help="write the table into docs/serve.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.table:
        print(shown(read()))
        return
    before = shown(read())
    if options.packages is not None:
        PACKAGES.append(str(options.packages.resolve()))
    torch.set_num_threads(1)
    run = environment()
    with options.results.open("a", encoding="utf-8") as file:
        for row in measured(options.clients):
            print(json.dumps(row), flush=True)
            file.write(json.dumps({**row, "run": run}) + "\n")
    if options.page:
        write_page(before, shown(read(options.results)))


if __name__ == "__main__":
    main()
