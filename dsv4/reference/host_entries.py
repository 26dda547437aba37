"""Entries that are in host memory, in plain PyTorch: those that a decode step selects are fetched
into hot rows, those that a prefill step sees into its staging."""

from __future__ import annotations

import torch

from dsv4.cache.pages import Page
from dsv4.ops.calls import HotRows, Resolving, Staging
from dsv4.ops.columns import RequestColumns, token_columns
from dsv4.reference.pages import page_rows


def resolve(call: Resolving) -> None:
    for row, columns in enumerate(call.batch.tolist()):
        request = RequestColumns(*columns)
        if request.slot >= 0 and request.count > 0:
            _resolve_request(call, row, request)


def stage(call: Staging) -> None:
    page, target = call.entries.page, call.staged.page
    length = page.payload_bytes
    for columns in call.batch.tolist():
        request = RequestColumns(*columns)
        if request.slot < 0:
            continue
        visible = (request.start + request.count) // call.entries.ratio
        for block in range(-(-visible // page.rows)):
            on_device = int(call.entries.block_table[request.slot, block])
            if call.which != "all" and (call.which == "device") != (on_device >= 0):
                continue
            source = call.entries.arena[on_device]
            if on_device < 0:
                source = call.host[int(call.block_table[request.slot, block])]
            staged = call.staged.arena[int(call.staged.block_table[request.slot, block])]
            staged[target.offset_bytes : target.offset_bytes + length] = source[
                page.offset_bytes : page.offset_bytes + length
            ].to(staged.device)


def _resolve_request(call: Resolving, batch_row: int, request: RequestColumns) -> None:
    """The tokens of one request. `away` are those of its named entries that only the host has."""
    source, hot, slot = call.entries, call.hot, request.slot
    rows = slice(request.first_row, request.first_row + request.count)
    selected = call.selected[rows].long()
    visible = (token_columns(call.tokens[rows]).position.long() + 1) // source.ratio
    named = (selected >= 0) & (selected < visible[:, None])
    entry = torch.where(named, selected, 0)
    device_row = source.block_table[slot, entry // source.page.rows].long()
    away = named & (device_row < 0)

    now = int(hot.clock[slot]) + 1
    hot.clock[slot] = now
    place = hot.place[slot]
    placed = place[entry[away]].long()
    hot.used[slot, placed[placed >= 0]] = now
    misses = [
        miss
        for nth in range(request.count)
        for miss in _replace(hot, slot, now, entry[nth][away[nth]])
    ]
    found = device_row * source.page.rows + entry % source.page.rows
    first = (hot.first_row * source.page.rows) + slot * hot.records
    found = torch.where(away, first + place[entry].long(), found)
    call.rows[rows] = torch.where(named, found, -1).to(call.rows.dtype)
    call.miss_count[batch_row] = len(misses)
    for nth, (missed, record) in enumerate(misses):
        call.misses[batch_row, nth, 0], call.misses[batch_row, nth, 1] = missed, record
        block_id = int(call.block_table[slot, missed // source.page.rows])
        at = first + record
        target = source.arena[at // source.page.rows]
        _copy_record(
            source.page,
            call.host[block_id],
            missed % source.page.rows,
            target,
            at % source.page.rows,
        )
    record_bytes = source.page.record_bytes
    hits = int(torch.count_nonzero(away)) - len(misses)
    counts = (hits, len(misses), len(misses) * record_bytes)
    hot.counted.add_(torch.tensor(counts, device=hot.counted.device))


def _replace(hot: HotRows, slot: int, now: int, entries: torch.Tensor) -> list[tuple[int, int]]:
    """Gives places to the entries of one token that have none: (entry, hot record) of each."""
    place, used = hot.place[slot], hot.used[slot]
    missed = entries[place[entries] < 0]
    if not len(missed):
        return []
    circle = (torch.arange(hot.records, device=used.device) + hot.hand[slot]) % hot.records
    victims = circle[used[circle] != now][: len(missed)]
    hot.hand[slot] = (int(victims[-1]) + 1) % hot.records
    former = hot.entry_of[slot, victims].long()
    # a record of an entry that was named twice is not where the entry is
    had = (former >= 0) & (place[former.clamp(min=0)] == victims)
    place[former[had]] = -1
    place[missed] = victims.to(place.dtype)
    hot.entry_of[slot, victims] = missed.to(hot.entry_of.dtype)
    used[victims] = now
    return list(zip(missed.tolist(), victims.tolist(), strict=True))


def _copy_record(
    page: Page, source: torch.Tensor, record: int, target: torch.Tensor, target_record: int
) -> None:
    for of_source, of_target in zip(
        page_rows(source[None], page), page_rows(target[None], page), strict=True
    ):
        of_target[0, target_record] = of_source[0, record].to(target.device)
