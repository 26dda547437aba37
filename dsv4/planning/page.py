"""What the planner's page in the docs asks: one question as JSON, one answer as JSON. It runs in
the browser, in Pyodide, where there is neither torch nor numpy.

    model          a preset
    count, gpu     how many, and a name of gpus.py, or a size: "80GB"
    tp, pp         tensor-parallel ranks and stages
    context        tokens that the sentence and the memory of a GPU are about
    host_memory    for entries of requests, over all GPUs; empty: none
    activations    of each GPU; empty: not counted
"""

from __future__ import annotations

import json
from typing import Any

from dsv4.errors import Dsv4Error
from dsv4.planning.deployment import Load
from dsv4.planning.gpus import GPUS
from dsv4.planning.question import plan_gpus, schema_maker
from dsv4.planning.weights import PRESET_WEIGHTS
from dsv4.planning.words import answer, notes
from dsv4.units import format_like, format_tokens, parse_bytes

# of the curve
CONTEXTS = tuple(1024 << nth for nth in range(11))


def choices() -> str:
    """The models and named GPUs that the page offers, as JSON."""
    gpus = {gpu.name: gpu.memory_bytes for gpu in GPUS.values()}
    return json.dumps({"models": list(PRESET_WEIGHTS), "gpus": gpus, "contexts": list(CONTEXTS)})


def ask(question: str) -> str:
    """The answer, or `error`, as JSON."""
    try:
        return json.dumps(_answer(json.loads(question)))
    except Dsv4Error as error:
        return json.dumps({"error": str(error)})


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    host, activations = asked.get("host_memory"), asked.get("activations")
    load = Load(
        host_memory_bytes=parse_bytes(host) if host else None,
        activations_bytes=parse_bytes(activations) if activations else 0,
    )
    gpus = f"{int(asked['count'])}x{asked['gpu']}"
    options: dict[str, Any] = {
        "make_schema": schema_maker(),
        "tp": int(asked.get("tp", 1)),
        "pp": int(asked.get("pp", 1)),
        "weights": None,
        "drafts": False,
        "load": load,
        "compare": False,
    }
    context, model = int(asked["context"]), asked["model"]
    found, written = plan_gpus(model, gpus, contexts=[context], **options)
    curve, _ = plan_gpus(model, gpus, contexts=CONTEXTS, **options)
    rank = found.chosen.rank
    assert rank is not None
    return {
        "answer": answer(found, written),
        "fits": found.fits,
        "layout": found.chosen.layout,
        "cache": found.chosen.cache,
        "memory": [
            {"what": what, "bytes": size, "text": format_like(size, written.unit)}
            for what, size in (
                ("weights", rank.weights),
                ("activations", rank.activations),
                ("workspace", rank.workspace),
                ("left for requests", max(0, rank.left)),
            )
        ],
        "memory_bytes": rank.memory,
        "curve": [
            {
                "context": fit.context_tokens,
                "label": format_tokens(fit.context_tokens),
                "dsv4": fit.requests,
                "with host memory": fit.with_host_memory,
                **fit.peers,
            }
            for fit in curve.chosen.fits
        ],
        "command": _command(asked, gpus),
        "notes": notes(found),
    }


def _command(asked: dict[str, Any], gpus: str) -> str:
    """The same question to the command line."""
    words = ["dsv4 plan", asked["model"], "--gpus", gpus]
    for option, value in (("--tp", asked.get("tp")), ("--pp", asked.get("pp"))):
        if int(value or 1) > 1:
            words += [option, str(value)]
    words += ["--context", format_tokens(int(asked["context"]))]
    for option, name in (("--host-memory", "host_memory"), ("--activations", "activations")):
        if asked.get(name):
            words += [option, str(asked[name])]
    return " ".join(words)
