"""Every benchmark case there is, by suite. A module is named after the operation that it times; the
suites have the names that results files know them by. A suite that needs a package which is not
installed raises ImportError when it is asked for its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from benchmarks import (
    append,
    attend,
    candidates,
    decode_step,
    gather,
    host,
    index_query,
    index_scores,
    prefill,
    prefix,
    residency,
    top_k,
)
from benchmarks.case import Case


def _tiers() -> Iterable[Case]:
    from benchmarks import tiers

    return tiers.cases()


def _transformers() -> Iterable[Case]:
    from benchmarks import transformers_decode

    return transformers_decode.cases()


def _indexer() -> Iterable[Case]:
    return chain(index_query.cases(), index_scores.cases(), top_k.cases())


def _v41() -> Iterable[Case]:
    """Whole steps first: they make most kernels of the others, several at a time."""
    return chain(
        decode_step.v41_cases(),
        prefill.v41_cases(),
        attend.v41_cases(),
        append.v41_cases(),
        index_scores.v41_cases(),
        candidates.cases(),
    )


SUITES: dict[str, Callable[[], Iterable[Case]]] = {
    "host": host.cases,
    "prefix": prefix.cases,
    "tiers": _tiers,
    "writes": append.cases,
    "gather": gather.cases,
    "indexer": _indexer,
    "attention": attend.cases,
    "ranks": attend.rank_cases,
    "prefill": prefill.cases,
    "decode_step": decode_step.cases,
    "residency": residency.cases,
    "v41": _v41,
    "transformers": _transformers,
}
