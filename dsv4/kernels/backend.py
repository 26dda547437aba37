"""The kernels as one object: dsv4.ops.backend says what each operation promises. The one place that
decides which kernel runs on which GPU."""

from __future__ import annotations

import torch

from dsv4.cache.records import RecordFormat
from dsv4.errors import SchemaError
from dsv4.kernels import append, attend, gather, index_query, index_scores, select, write_records
from dsv4.kernels.device import is_hopper
from dsv4.model import ModelSpec
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import Attention, Scoring, Selection


class TritonBackend:
    name: BackendName = "triton"

    append = staticmethod(append.append)
    write_records = staticmethod(write_records.write_records)
    gather_entries = staticmethod(gather.gather_entries)
    gather_all_entries = staticmethod(gather.gather_all_entries)
    gather_window = staticmethod(gather.gather_window)
    prepare_index_queries = staticmethod(index_query.prepare_index_queries)
    select_workspace_bytes = staticmethod(select.select_workspace_bytes)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hopper = is_hopper(device)

    def check_format(self, record: RecordFormat) -> None:
        if record.value_dtype != "bfloat16":
            raise SchemaError(
                f"the Triton kernels compute from bfloat16 values, the format {record.name} keeps "
                f"{record.value_dtype}: use backend='reference' or another format"
            )

    def index_scores(self, call: Scoring) -> None:
        if self._hopper:
            from dsv4.kernels.hopper import index_scores as hopper  # Gluon, which only compiles

            if hopper.supports(call):
                return hopper.index_scores(call)
        index_scores.index_scores(call)

    def select(self, call: Selection) -> None:
        select.select(call, score=self.index_scores)

    def attend(self, call: Attention) -> None:
        if self._hopper:
            from dsv4.kernels.hopper import attend as hopper  # Gluon, which only compiles

            if hopper.supports(call):
                return hopper.attend(call)
        attend.attend(call)

    def attend_workspace_bytes(self, tokens: int, *, model: ModelSpec, max_entries: int) -> int:
        splits = attend.split_count(model.window, max_entries)
        elements = attend.workspace_elements(tokens, model.heads, model.head_dim, splits)
        if self._hopper:
            from dsv4.kernels.hopper import attend as hopper

            elements = max(elements, hopper.workspace_elements(self._device))
        return 4 * elements
