"""Stored bytes carry meaning: a model that was trained to recall finds values thousands of tokens
back, through entries that its indexer selects, with every kind of record; and no more once those
very bytes are damaged."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from dsv4 import CacheSchema, KVCacheManager
from dsv4.cache.pages import PageKind
from dsv4.demo_model import parallel
from dsv4.demo_model.cached import CachedModel
from dsv4.demo_model.checkpoint import RECALL, load_network
from dsv4.demo_model.recall import Recall, recall

NETWORK = load_network(RECALL)
TOKENS, PAIRS, QUESTIONS = 4096, 24, 12
CHUNK = 1024
CSA = 1  # the layer that has entries
GOOD, BAD = 0.9, 0.5  # parts of the questions; 1.0 and at most 0.25 were seen


@cache
def text(seed: int) -> Recall:
    return recall(
        TOKENS, pairs=PAIRS, questions=QUESTIONS, generator=torch.Generator().manual_seed(seed)
    )


class Reader:
    """A request that has read a text up to its questions."""

    def __init__(self, asked: Recall, entries: str, keys: str) -> None:
        schema = CacheSchema.build(
            NETWORK.spec,
            max_context=TOKENS,
            entry_format=entries,
            index_format=keys,
            max_draft_tokens=2,  # that many tokens can be taken back
        )
        self.manager = KVCacheManager(
            schema, num_blocks=schema.blocks_for(TOKENS), max_requests=1, max_step_tokens=CHUNK
        )
        self.manager.memory.block_arena.bytes.fill_(0xFF)
        self.asked, self._model = asked, CachedModel(NETWORK, self.manager)
        self.request = self.manager.admit_request(TOKENS)
        self._body = TOKENS - 3 * QUESTIONS
        for first in range(0, self._body, CHUNK):
            self._run(asked.ids[first : min(first + CHUNK, self._body)], ())

    def _run(self, ids: Tensor, rows: tuple[int, ...]) -> Tensor:
        with self.manager.step([(self.request, len(ids))]) as plan:
            return self._model.forward(plan, ids, torch.tensor(rows, dtype=torch.int64))

    def right(self) -> float:
        """The part of the questions that is answered right. The request is then as before."""
        answers = []
        for nth, value in enumerate(self.asked.values):  # each is asked alone, after the same text
            ids = self.asked.ids[self._body + 3 * nth :][:2]
            answers.append(self._run(ids, (1,)).argmax() == value)
            self.manager.rewind(self.request, self._body)
        return float(torch.stack(answers).float().mean())

    def damage(self, kind: PageKind, entries: list[int]) -> None:
        """Turns one bit of each byte that the CSA layer has stored for these entries."""
        page = self.manager.schema.layout.page(kind, CSA)
        assert page is not None
        size = page.format.data_row_bytes
        for entry in entries:
            row = self.manager.room.block_id(self.request, entry // page.rows)
            first = page.offset_bytes + entry % page.rows * size
            self.manager.memory.block_arena.bytes[row, first : first + size] ^= 0x80


def entries_of(asked: Recall) -> list[int]:
    """Those into which the pairs that are asked for went: each token gives to two."""
    tokens = torch.cat((asked.found, asked.found + 1))
    return sorted({int(token) // 4 + more for token in tokens for more in (0, 1)})


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        ("fp32", "fp32"),
        ("fp8_ds", "mxfp4"),
        pytest.param("bf16", "bf16", marks=pytest.mark.nightly),
        pytest.param("fp8_ds", "nvfp4", marks=pytest.mark.nightly),
        pytest.param("v41_fp4", "mxfp4", marks=pytest.mark.nightly),
    ],
)
def test_what_lies_far_back_is_found_until_its_bytes_are_damaged(entries: str, keys: str):
    asked = text(11)
    assert int(asked.found.max()) < TOKENS * 3 // 4  # far past the window of 16
    reader = Reader(asked, entries, keys)
    assert reader.right() >= GOOD
    far = entries_of(asked)
    others = [entry for entry in range(TOKENS // 4 - 3 * QUESTIONS) if entry not in far]
    reader.damage("entries", others[::7])  # other entries do not matter
    assert reader.right() >= GOOD
    reader.damage("entries", far)
    assert reader.right() <= BAD
    reader.damage("entries", far)  # the same bits again: whole
    assert reader.right() >= GOOD
    reader.damage("index_keys", far)  # the entries are whole, but the indexer does not find them
    assert reader.right() <= BAD


def test_other_texts_are_recalled_too():
    """Each of them: the text of the other test was not chosen. (Without a cache, which is
    faster.)"""
    texts = [text(seed) for seed in range(20)]
    with torch.no_grad():
        found = [parallel.run(NETWORK, each.ids[None], rows=each.asked) for each in texts]
    for each, result in zip(texts, found, strict=True):
        right = result.logits[0].argmax(dim=-1) == each.values
        assert float(right.float().mean()) >= GOOD


@pytest.mark.nightly
@pytest.mark.parametrize("entries", ["fp8_ds", "v41_fp4"])
def test_other_texts_are_recalled_from_few_bits(entries: str):
    assert all(Reader(text(seed), entries, "mxfp4").right() >= GOOD for seed in range(6))
