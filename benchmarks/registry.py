"""Every benchmark case there is, by suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks import (
    attention,
    decode_step,
    gather,
    host,
    indexer,
    prefix,
    transformers_decode,
    writes,
)
from benchmarks.case import Case

SUITES: dict[str, Callable[[], Iterable[Case]]] = {
    "host": host.cases,
    "prefix": prefix.cases,
    "writes": writes.cases,
    "gather": gather.cases,
    "indexer": indexer.cases,
    "attention": attention.cases,
    "decode_step": decode_step.cases,
    "transformers": transformers_decode.cases,
}
