"""Attention against the dense formula in float64, on arenas where every row that no query may read
is NaN. `make_step` also feeds tests/kernels/test_attend.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.cache.pages import Page, PageForm, PageKind
from dsv4.ops.calls import Attention, EntrySource, WindowSource
from dsv4.reference.append import write_records
from dsv4.reference.attend import RUN_TOKENS, attend
from dsv4.reference.codec import decode, encode
from tests.support.numbers import Numbers

TOLERANCE = 4e-3
POISON = 0xFF
WILD = (-1, -7, -(2**31), 2**31 - 1, 10**6)


@dataclass
class Step:
    """Arguments of `attend`, and for each token the keys it may see, fp64 [n, width]."""

    q: Tensor
    sink: Tensor
    tokens: Tensor
    batch: Tensor
    window: WindowSource
    entries: EntrySource | None
    indices: Tensor | None
    keys: list[Tensor | None]
    rope: Tensor

    def run(
        self,
        function: Callable[[Attention], None],
        *,
        turn: bool = False,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output and lse; what is not written stays NaN."""
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan, device=self.q.device)
        function(self.call(turn=turn, out=out, lse=lse, workspace=workspace))
        return out, lse

    def call(
        self, *, turn: bool = False, out: Tensor, lse: Tensor, workspace: Tensor | None = None
    ) -> Attention:
        return Attention(
            q=self.q,
            sink=self.sink,
            tokens=self.tokens,
            batch=self.batch,
            window=self.window,
            entries=self.entries,
            indices=self.indices,
            out=out,
            lse=lse,
            inverse_rope=self.rope if turn else None,
            workspace=workspace,
        )

    def take(self, rows: Sequence[int]) -> Step:
        """A step of only these tokens, in this order."""
        at = torch.tensor(rows, dtype=torch.long)
        return replace(
            self,
            q=self.q[at],
            tokens=self.tokens[at],
            indices=None if self.indices is None else self.indices[at],
            keys=[self.keys[row] for row in rows],
        )


NAN_CHANNEL = 37


def with_nan(step: Step, token: int, *, entry: bool) -> list[bool]:
    """Stores a NaN in one channel of the newest key of a token's window, or in that of the first
    entry it names (sees); returns which tokens read that key."""
    slot, position, batch_row = step.tokens[token, :3].tolist()
    if entry:
        assert step.entries is not None
        source, page = step.entries, step.entries.page
        nth = 0
        if step.indices is not None:
            visible = (position + 1) // source.ratio
            listed = step.indices[token]
            nth = int(listed[(listed >= 0) & (listed < visible)][0])
        arena = source.arena
        arena_row = source.block_table[slot, nth // page.rows].long().reshape(1)
        page_row = torch.tensor([nth % page.rows], device=arena.device)
    else:
        arena, page = step.window.arena, step.window.page
        arena_row = torch.tensor([0 if step.window.staged else slot], device=arena.device)
        row = position % page.rows
        if step.window.staged:
            _, start, _, first_row = step.batch[batch_row].tolist()
            row = first_row + (step.window.window - 1) * (batch_row + 1) + position - start
        page_row = torch.tensor([row], device=arena.device)
    vector = Numbers(5).normal(1, page.format.width).to(arena.device, torch.bfloat16)
    vector[0, NAN_CHANNEL] = torch.nan
    write_records(arena, page, arena_row, page_row, vector)
    found = []
    for other, (of, at, _, _) in enumerate(step.tokens.tolist()):
        seen = of == slot and of >= 0
        if not entry:
            found.append(seen and position <= at < position + step.window.window)
            continue
        assert step.entries is not None
        seen = seen and nth < (at + 1) // step.entries.ratio
        if step.indices is not None:
            seen = seen and nth in step.indices[other].tolist()
        found.append(seen)
    return found


def make_step(
    requests: Sequence[tuple[int, int]],
    *,
    kind: str,
    seed: int = 0,
    heads: int = 4,
    width: int = 128,
    rope_dim: int = 64,
    window: int = 16,
    ratio: int = 4,
    page_rows: int = 8,
    top_k: int = 24,
    record: str = "fp8_ds",
    window_record: str | None = None,
    chunk: bool = False,
    padding: int = 0,
    slack: int = 3,
    max_entries: int | None = None,
    spread: float = 1.0,
    page_form: PageForm = "planes",
) -> Step:
    """Requests of (start, tokens) with random records in blocks of random order.

    `kind` is swa, csa (a list of `top_k` indices, wild ones among them) or hca.
    """
    numbers = Numbers(seed)

    def random(*shape: int) -> Tensor:
        return (numbers.normal(*shape) * spread).to(torch.bfloat16)

    def page(name: PageKind, rows: int, chosen: str) -> Page:
        form = records.entry_format(chosen, head_dim=width, rope_dim=rope_dim)
        return Page(kind=name, layer=0, offset_bytes=48, rows=rows, format=form, form=page_form)

    def arena_of(rows: int, source: Page) -> Tensor:
        row_bytes = -(-(source.offset_bytes + source.payload_bytes + 16) // 16) * 16
        return torch.full((rows, row_bytes), POISON, dtype=torch.uint8)

    def stored(source: Page, rows: Tensor) -> Tensor:
        return decode(source.format, *encode(source.format, rows)).double()

    slots = numbers.permutation(len(requests) + 2)[: len(requests)].tolist()
    first_rows = [sum(n for _, n in requests[:i]) for i in range(len(requests))]
    total = sum(n for _, n in requests)
    ring_rows = total + (window - 1) * len(requests) if chunk else window + slack
    window_page = page("window", ring_rows, window_record or record)
    window_arena = arena_of(1 if chunk else len(requests) + 2, window_page)
    entry_page = page("entries", page_rows, record)
    capacity = max_entries or max((s + n) // ratio for s, n in requests)
    blocks = max(1, -(-capacity // page_rows))
    entry_arena = arena_of(len(requests) * blocks + 3, entry_page)
    table = torch.full((len(requests) + 2, blocks), 2**30, dtype=torch.int32)
    order = numbers.permutation(len(requests) * blocks + 3).int()

    tokens, batch, indices, keys = [], [], [], []
    for row, (start, count) in enumerate(requests):
        slot, end, first_row = slots[row], start + count, first_rows[row]
        batch.append((slot, start, count, first_row))
        oldest = max(0, start - window + 1)
        vectors = random(end - oldest, width)
        position = torch.arange(oldest, end)
        if chunk:
            page_row = first_row + (window - 1) * row + position - (start - (window - 1))
            write_records(window_arena, window_page, position * 0, page_row, vectors)
        else:
            at = torch.full_like(position, slot)
            write_records(window_arena, window_page, at, position % ring_rows, vectors)
        near = stored(window_page, vectors)
        far = torch.zeros(0, width, dtype=torch.float64)
        if kind != "swa" and end >= ratio:
            used = order[row * blocks :][: -(-(end // ratio) // page_rows)]
            table[slot, : len(used)] = used
            vectors = random(end // ratio, width)
            entry = torch.arange(end // ratio)
            at = table[slot, entry // page_rows].long()
            write_records(entry_arena, entry_page, at, entry % page_rows, vectors)
            far = stored(entry_page, vectors)
        for t in range(start, end):
            tokens.append((slot, t, row, 0))
            visible = (t + 1) // ratio
            seen = far[:visible]
            if kind == "csa":
                chosen = numbers.permutation(visible)[: top_k - len(WILD)]
                listed = torch.cat(
                    (chosen, torch.tensor([*WILD, visible]), torch.full((top_k,), -1))
                )
                listed = listed[:top_k]
                indices.append(listed[numbers.permutation(top_k)].int())
                seen = far[chosen]
            keys.append(torch.cat((near[max(0, t - window + 1) - oldest : t + 1 - oldest], seen)))
    tokens += [(-1, -1, -1, -1)] * padding
    indices += [torch.full((top_k,), 3, dtype=torch.int32)] * padding * (kind == "csa")
    angles = torch.outer(
        torch.arange(float(max(s + n for s, n in requests))),
        10000 ** -(torch.arange(rope_dim // 2) * 2 / rope_dim),
    )
    return Step(
        q=random(total + padding, heads, width),
        sink=numbers.normal(heads),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        batch=torch.tensor(batch, dtype=torch.int32),
        window=WindowSource(arena=window_arena, page=window_page, window=window, staged=chunk),
        entries=None
        if kind == "swa"
        else EntrySource(arena=entry_arena, page=entry_page, block_table=table, ratio=ratio),
        indices=torch.stack(indices) if kind == "csa" else None,
        keys=[*keys, *[None] * padding],
        rope=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )


def expected(step: Step, *, turn: bool = False) -> tuple[Tensor, Tensor]:
    """The formula in float64; NaN in rows of padding."""
    out = torch.full_like(step.q, torch.nan, dtype=torch.float64)
    lse = torch.full_like(out[..., 0], torch.nan)
    for row, keys in enumerate(step.keys):
        if keys is None:
            continue
        logits = step.q[row].double() @ keys.T * step.q.shape[2] ** -0.5
        lse[row] = torch.logsumexp(logits, dim=-1)
        share = torch.softmax(torch.cat((logits, step.sink.double()[:, None]), dim=-1), dim=-1)
        out[row] = share[:, :-1] @ keys
        if turn:
            width = step.rope.shape[1]
            cos, sin = step.rope[step.tokens[row, 1]].double().chunk(2)
            pairs = torch.view_as_complex(out[row, :, -width:].reshape(-1, width // 2, 2))
            turned = torch.view_as_real(pairs * torch.complex(cos, -sin))
            out[row, :, -width:] = turned.flatten(-2)
    return out, lse


def check(step: Step, found: tuple[Tensor, Tensor], *, turn: bool = False) -> None:
    """Rows of padding are untouched; the others are near, each head of each token by itself."""
    out, lse = expected(step, turn=turn)
    live = torch.tensor([keys is not None for keys in step.keys])
    assert torch.isnan(found[0][~live]).all()
    assert torch.isnan(found[1][~live]).all()
    error = (found[0][live].double() - out[live]).norm(dim=-1) / out[live].norm(dim=-1)
    assert error.max() <= TOLERANCE, error
    assert (found[1][live] - lse[live]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("turn", [False, True])
def test_is_the_dense_formula(kind: str, turn: bool) -> None:
    step = make_step([(40, 2), (0, 1), (129, 3)], kind=kind, padding=2)
    check(step, step.run(attend, turn=turn), turn=turn)


@pytest.mark.parametrize("record", ["fp8_row", "bf16"])
def test_other_records_and_a_window_of_its_own(record: str) -> None:
    step = make_step([(77, 1), (12, 1)], kind="csa", record=record, window_record="fp8_ds")
    check(step, step.run(attend))


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_a_chunk_reads_staged_rows(kind: str) -> None:
    step = make_step([(0, 9), (21, 30), (5, 1)], kind=kind, chunk=True)
    check(step, step.run(attend, turn=True), turn=True)


def test_one_token_attends_itself() -> None:
    step = make_step([(0, 1)], kind="hca")
    out, lse = step.run(attend)
    assert step.keys[0] is not None
    logit = (step.q[0].double() @ step.keys[0][0]) * step.q.shape[2] ** -0.5
    assert torch.allclose(lse[0].double(), logit, atol=1e-5)
    share = torch.sigmoid(logit - step.sink.double())
    assert torch.allclose(out[0].double(), share[:, None] * step.keys[0], rtol=1e-2)


def test_sinks_at_the_ends() -> None:
    step = make_step([(40, 1)], kind="csa")
    step.sink = torch.tensor([-torch.inf, torch.inf, 80.0, -80.0])
    out, lse = step.run(attend)
    without, _ = replace(step, sink=torch.full((4,), -1e9)).run(attend)
    assert torch.equal(out[:, 0], without[:, 0])
    assert torch.equal(out[:, 3], without[:, 3])
    assert (out[:, 1] == 0).all()
    assert out[:, 2].abs().max() < 1e-20
    assert torch.isfinite(lse).all()


def test_large_logits_do_not_overflow() -> None:
    step = make_step([(60, 1)], kind="hca", spread=30.0)
    check(step, step.run(attend))


def test_a_step_of_padding_touches_nothing() -> None:
    step = make_step([(3, 1)], kind="csa", padding=3).take([1, 2, 3])
    out, lse = step.run(attend)
    assert torch.isnan(out).all()
    assert torch.isnan(lse).all()


def test_inverse_rope_turns_the_rounded_output() -> None:
    step = make_step([(50, 1)], kind="csa")
    plain, _ = step.run(attend)
    turned, _ = step.run(attend, turn=True)
    width = step.rope.shape[1]
    assert torch.equal(plain[..., :-width], turned[..., :-width])
    cos, sin = step.rope[50].chunk(2)
    even, odd = plain[..., -width::2].float(), plain[..., -width + 1 :: 2].float()
    assert torch.equal(turned[..., -width::2], (even * cos + odd * sin).bfloat16())
    assert torch.equal(turned[..., -width + 1 :: 2], (odd * cos - even * sin).bfloat16())


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("chunk", [False, True])
def test_no_bit_depends_on_the_neighbours(kind: str, chunk: bool) -> None:
    """Runs of neighbours that are longer and shorter than RUN_TOKENS, padding between them, tokens
    in any order: what they share, each would have read for itself."""
    step = make_step(
        [(37, RUN_TOKENS + 9), (0, 1), (5, 3)], kind=kind, chunk=chunk, padding=2, slack=99
    )
    count = step.q.shape[0]
    out, lse = step.run(attend, turn=True)
    check(step, (out, lse), turn=True)
    for row in (0, 1, RUN_TOKENS - 1, RUN_TOKENS, RUN_TOKENS + 8, count - 3):
        alone = step.take([row]).run(attend, turn=True)
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], lse[row])
    order = Numbers(1).permutation(count).tolist()
    mixed = step.take(order).run(attend, turn=True)
    for found, expect in zip(mixed, (out, lse), strict=True):
        assert torch.equal(found.nan_to_num(7), expect[order].nan_to_num(7))


@pytest.mark.parametrize("record", ["fp8_ds", "fp8_row", "bf16", "v41"])
@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(record: str, entry: bool) -> None:
    names = {"window_record": "v41_fp8", "record": "v41_fp4"} if record == "v41" else {}
    step = make_step([(40, 2), (29, 1)], kind="csa", **(names or {"record": record}))
    before = step.run(attend)
    hurt = torch.tensor(with_nan(step, 1, entry=entry))
    out, lse = step.run(attend)
    assert 0 < hurt.sum() < len(hurt)
    assert out[hurt].isnan().all()
    assert lse[hurt].isnan().all()
    assert torch.equal(out[~hurt], before[0][~hurt])
    assert torch.equal(lse[~hurt], before[1][~hurt])


@pytest.mark.parametrize("record", ["fp8_ds", "bf16"])
def test_keys_of_logit_minus_infinity_are_none(record: str) -> None:
    """The output is 0 then, whatever the sink, as for a query without keys."""
    step = make_step([(0, 1), (9, 1)], kind="swa", record=record)
    key = step.keys[0]
    assert key is not None
    step.q[0, 2:, 5] = -torch.inf * torch.sign(key[0, 5]).float()
    step.sink = torch.tensor([3e38, 0.0, -torch.inf, 3e38])
    out, lse = step.run(attend)
    assert (out[0, 2:] == 0).all()
    assert (lse[0, 2:] == -torch.inf).all()
    assert (out[:, 0] == 0).all()  # such a sink leaves nothing to any key
    assert out[:, 1].isfinite().all()
    assert not out[1].isnan().any()
    assert lse[1].isfinite().all()
