"""Which implementation runs: plain PyTorch anywhere, or the Triton kernels.

Both offer the same functions on the same arguments. What they write is the same byte for byte; what
they compute from it differs at most in the order of fp32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4.cache.records import RecordFormat
from dsv4.errors import InvalidInput, SchemaError
from dsv4.model import ModelSpec

BackendName = Literal["reference", "triton"]
Operation = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The operations of one implementation; dsv4/reference documents each."""

    name: BackendName
    append: Operation
    write_records: Operation
    gather_entries: Operation
    gather_all_entries: Operation
    gather_window: Operation
    prepare_index_queries: Operation
    index_scores: Operation
    select: Operation
    attend: Operation
    select_workspace_bytes: Callable[..., int]
    attend_workspace_elements: Callable[[int, ModelSpec, int], int]


def load_backend(name: BackendName | None, device: torch.device) -> Backend:
    """`None` takes Triton on a GPU and the reference elsewhere. On a CPU the Triton kernels run
    only under its interpreter (TRITON_INTERPRET=1 before the first import): for tests."""
    chosen = name or ("triton" if device.type == "cuda" else "reference")
    if chosen == "reference":
        return Backend(
            name="reference",
            attend_workspace_elements=lambda tokens, model, entries: 0,
            **_reference(),
        )
    if chosen != "triton":
        raise InvalidInput(f"unknown backend {chosen!r}: choose 'reference' or 'triton'")
    from dsv4.kernels.numerics import INTERPRETED

    if device.type != "cuda" and not INTERPRETED.value:
        raise InvalidInput(
            f"the Triton backend needs a GPU, the cache is on {device}: use backend='reference'"
        )
    return Backend(name="triton", **_triton(device))


def check_formats(backend: Backend, formats: Iterable[RecordFormat]) -> None:
    """Raises SchemaError for a format that the backend has no code for."""
    for record in formats:
        if backend.name == "triton" and record.value_dtype != "bfloat16":
            raise SchemaError(
                f"the Triton kernels compute from bfloat16 values, the format {record.name} keeps "
                f"{record.value_dtype}: use backend='reference' or another format"
            )


def _reference() -> dict[str, Any]:
    from dsv4.reference import append, attend, gather, index_query, index_scores, select

    return {
        "append": append.append,
        "write_records": append.write_records,
        "gather_entries": gather.gather_entries,
        "gather_all_entries": gather.gather_all_entries,
        "gather_window": gather.gather_window,
        "prepare_index_queries": index_query.prepare_index_queries,
        "index_scores": index_scores.index_scores,
        "select": select.select,
        "select_workspace_bytes": select.select_workspace_bytes,
        "attend": attend.attend,
    }


def _triton(device: torch.device) -> dict[str, Any]:
    from dsv4.kernels import (
        append,
        attend,
        gather,
        index_query,
        index_scores,
        select,
        write_records,
    )
    from dsv4.kernels.device import is_hopper

    def attend_workspace_elements(tokens: int, model: ModelSpec, entries: int) -> int:
        splits = attend.split_count(model.window, entries)
        portable = attend.workspace_elements(tokens, model.heads, model.head_dim, splits)
        return max(portable, hopper_elements)

    hopper_elements, attend_op = 0, attend.attend
    if is_hopper(device):
        from dsv4.kernels.hopper import attend as attend_hopper  # needs Gluon, which only compiles

        hopper_elements = attend_hopper.workspace_elements(device)

        def attend_op(q: Tensor, sink: Tensor, **step: Any) -> None:
            fits = attend_hopper.supports(q, step["window"], step["entries"])
            (attend_hopper.attend if fits else attend.attend)(q, sink, **step)

    return {
        "append": append.append,
        "write_records": write_records.write_records,
        "gather_entries": gather.gather_entries,
        "gather_all_entries": gather.gather_all_entries,
        "gather_window": gather.gather_window,
        "prepare_index_queries": index_query.prepare_index_queries,
        "index_scores": index_scores.index_scores,
        "select": select.select,
        "select_workspace_bytes": select.select_workspace_bytes,
        "attend": attend_op,
        "attend_workspace_elements": attend_workspace_elements,
    }
