"""Whole lives of requests whose entries may be in host memory, on a GPU: copies run on streams of
their own, steps are captured, and every output bit is that of a manager with everything on the
device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.cache.batch import Batch
from tests.scenarios.test_residency_random import CASES, Worlds, assert_both_were_needed

pytestmark = [pytest.mark.gpu, pytest.mark.extra("tiers")]


class CapturedWorlds(Worlds):
    """Padded decode batches of the second manager are captured when they come for the second time,
    and replayed from then on, whatever is hot."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, device="cuda", **options)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self.seen: set[int] = set()

    def read_from_host(self, batch: Batch, ids: list[int]) -> torch.Tensor:
        where = batch.tokens.data_ptr()  # of a lane
        if not batch.is_decode or batch.padded_tokens == batch.num_tokens:
            return super().read_from_host(batch, ids)
        if where not in self.seen:  # compiles
            self.seen.add(where)
            return super().read_from_host(batch, ids)
        if where not in self.graphs:
            given = torch.zeros(batch.padded_tokens, dtype=torch.int64, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = self.model.run_padded(self.managers[1], batch, given)
            self.graphs[where] = graph, given, found
        graph, given, found = self.graphs[where]
        given.zero_()
        given[: len(ids)] = torch.tensor(ids, device="cuda")
        graph.replay()
        batch.mark_appended()
        self.count("replayed")
        return found[: len(ids)]


@pytest.mark.parametrize(("model", "drafts", "plans"), CASES)
def test_outputs_do_not_depend_on_where_entries_are(model: str, drafts: int, plans: int) -> None:
    worlds = CapturedWorlds(model, 5, drafts=drafts, plans=plans)
    worlds.live(120, two=plans > 1)
    assert_both_were_needed(worlds)
    assert worlds.counts["replayed"] > 3
