"""The reference as one object: dsv4.ops.backend says what each operation promises."""

from __future__ import annotations

from collections.abc import Callable

from dsv4.cache.records import RecordFormat
from dsv4.model import ModelSpec
from dsv4.ops.backend import BackendName
from dsv4.reference import append as writes
from dsv4.reference import attend as attention
from dsv4.reference import follow as following
from dsv4.reference import gather, index_query
from dsv4.reference import host_entries as from_host
from dsv4.reference import index_scores as scoring
from dsv4.reference import select as selection
from dsv4.reference.repeat import repeatable


class ReferenceBackend:
    name: BackendName = "reference"

    follow = staticmethod(following.follow)
    append = staticmethod(writes.append)
    write_records = staticmethod(writes.write_records)
    gather_entries = staticmethod(gather.gather_entries)
    gather_all_entries = staticmethod(gather.gather_all_entries)
    gather_window = staticmethod(gather.gather_window)
    prepare_index_queries = staticmethod(index_query.prepare_index_queries)
    index_scores = staticmethod(scoring.index_scores)
    select = staticmethod(selection.select)
    select_workspace_bytes = staticmethod(selection.select_workspace_bytes)
    attend = staticmethod(attention.attend)
    resolve = staticmethod(from_host.resolve)
    stage = staticmethod(from_host.stage)

    repeatable = staticmethod(repeatable)

    def warm_up(
        self, calls: Callable[[], None], *, workers: int, progress: Callable[[int, int], None]
    ) -> int:
        return 0

    def check_format(self, record: RecordFormat) -> None:
        """Accepts every format."""

    def check_ratio(self, layer: int, ratio: int) -> None:
        """Accepts every ratio."""

    def check_apart(self) -> None:
        """They are written and read."""

    def attend_workspace_bytes(self, tokens: int, *, model: ModelSpec, max_entries: int) -> int:
        return 0
