"""After an interrupt: rebuilds all bookkeeping from what holds something.

These are taken as they are: live requests (their blocks, slot and length), nodes of the prefix
index, offers, pins and open plans. Everything else follows from them: free slots and blocks,
references, what is in flight, the device's table. So a call may be interrupted between any two
statements. What cannot be derived is in the `Change` of the interrupted call: what it was about to
return, which its caller never got, and which request's slot it was overwriting.

Everything here may run again, if it is interrupted itself. Only here are private attributes of
other classes written: those that the classes themselves keep up to date call by call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dsv4.cache.absent import NoHandoff, NoTiers
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.changes import LOGGER, Change, Turn
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.index import PrefixIndex, follow_events
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.pins import Pins
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import LENGTH, Request, RequestTable
from dsv4.cache.step import overlap
from dsv4.errors import ThreadError

if TYPE_CHECKING:
    from dsv4.cache.assembly import Parts
    from dsv4.cache.handoff.handoff import Handoff
    from dsv4.cache.transfers.tiers import Tiers


def recover(parts: Parts, tiers: Tiers | NoTiers, handoff: Handoff | NoHandoff) -> None:
    """`manager.recover`, of a manager with these parts. ThreadError while a call runs, one of a
    handle too."""
    guard, steps, prefix = parts.guard, parts.steps, parts.prefix
    number, interrupted = guard.take_over()
    turns = [lane.workspace.turn for lane in parts.memory.lanes]
    entered: list[Turn] = []
    try:
        for turn in turns:
            turn.enter("recover")
            entered.append(turn)
    except ThreadError:
        for turn in entered:
            turn.leave()
        guard.step_back(number)
        raise
    steps.open = recover_books(
        [change for *_, change in interrupted],
        open_plans=steps.open,
        table=parts.table,
        memory=parts.memory,
        prefix=prefix,
        tiers=tiers,
        handoff=handoff,
    )
    if parts.residency is not None:
        parts.residency.recover(prefix.index.nodes(), steps.open)
    for root in tuple(parts.table.supply.limits):  # what a fetch had pinned may go now
        parts.table.supply.trim(root)
    steps.forget()
    for turn in turns:
        turn.leave()
    guard.give_way(number)
    if interrupted:
        live = parts.leaving.staying()
        torn = sum(request.is_torn for request in live)
        LOGGER.warning(
            "recovered from an interrupted %s: %d requests live, %d of them torn",
            *(interrupted[0][1], len(live), torn),
        )


def recover_books(
    interrupted: Sequence[Change],
    *,
    open_plans: Sequence[ForwardPlan],
    table: RequestTable,
    memory: CacheMemory,
    prefix: PrefixCache | NoPrefix,
    tiers: Tiers | NoTiers,
    handoff: Handoff | NoHandoff,
) -> list[ForwardPlan]:
    """Returns the plans that are still open."""
    handed_out = [item for change in interrupted for item in change.handed_out]
    rewritten = [item for change in interrupted for item in change.rewritten]
    still_open = _plans(open_plans, table, handed_out)
    tiers.end_fetches()
    if handoff:
        handoff.end_arrivals()
        _host_memory(handoff)
    recover_index(prefix.index)
    _pins(prefix.pins, handed_out)
    recover_rows(prefix.rows, prefix.index.nodes(), prefix.captures.rows_of(still_open))
    cached = [node.block_id for node in prefix.index.nodes()]
    _slots(table, handed_out)
    _blocks(table, cached)
    for request in table.live.values():
        _request(table, request, is_rewritten=request in rewritten)
        if request.published_blocks:
            memory.publish(request.slot, 0, request.block_ids[: request.published_blocks])
    prefix.notices.recovered(prefix.index.nodes())
    return still_open


def _plans(
    open_plans: Sequence[ForwardPlan], table: RequestTable, handed_out: Collection[object]
) -> list[ForwardPlan]:
    """The plans that stay open. A plan is over if it was ended, never returned, or its lengths have
    moved: then the interrupted call has ended it."""
    still_open = []
    for plan in open_plans:
        moved = bool((table.numbers[LENGTH, plan.slots] != plan.starts).any())
        if plan.done or (moved and plan.after is None) or plan in handed_out:
            plan.close()
            overlap.move_up(plan, table, open_plans)
        else:
            still_open.append(plan)
    return still_open


def recover_index(index: PrefixIndex) -> None:
    """Restores how many blocks come after each one, the policy's order, and events that were not
    noted."""
    nodes = index.nodes()
    for node in nodes:
        node.children, node.is_cached = 0, True
    for node in nodes:
        if node.parent is not None:
            node.parent.children += 1
    index.policy.rebuild(nodes)
    if index.events is None:
        return
    known = index._reported.copy()
    follow_events(known, index.events)
    for digest, event in reversed(known.items()):
        found = index.get(digest)
        if found is None or found.block_id != event.block_id:
            index.events.append(replace(event, what="removed"))
    for node in nodes:
        if node.digest not in known or known[node.digest].block_id != node.block_id:
            index.note_event("stored", node)


def _pins(pins: Pins, handed_out: Collection[object]) -> None:
    """Restores pins that a caller has; fetches have ended, with what they pinned."""
    pins._block_ids = None
    pins._standing = {pin for pin in pins._standing if pin.lasting and pin not in handed_out}
    for node in pins._index.nodes():
        node.pins = 0
    for pin in pins._standing:
        for node in pin.nodes:
            node.pins += 1


def recover_rows(
    rows: SnapshotRows, nodes: Iterable[PrefixNode], reserved: Collection[int]
) -> None:
    """A snapshot row is a cached block's, or reserved by an open plan, or free: none is in
    flight."""
    owned = {node.snapshot: node for node in nodes if node.snapshot is not None}
    rows._taken, rows._in_flight = owned, set()
    rows._free = sorted(set(range(rows.total)).difference(owned, reserved), reverse=True)


def _host_memory(handoff: Handoff) -> None:
    """Rows and cells of the hand-off that no offer and no arrival has are free. A free cell is
    empty."""
    for pool, held in zip(
        (handoff.side.rows, handoff.side.pledges), handoff.held_memory(), strict=True
    ):
        pool._free = sorted(set(range(pool.count)).difference(held), reverse=True)
    for cell in handoff.side.pledges._free:
        handoff.side.pledges.wipe(cell)


def _slots(table: RequestTable, handed_out: Collection[object]) -> None:
    """A slot belongs to a live request, or is promised to an arrival, or is free. Requests that no
    caller has are released."""
    for holder, holding in list(table.holdings.items()):
        if holding.slot in table.live:  # the arrival's request has everything already
            del table.holdings[holder]
    for slot, request in list(table.live.items()):
        if request.released or request in handed_out:
            del table.live[slot]
            request.released = True
    taken = {*table.live, *(holding.slot for holding in table.holdings.values())}
    table.free_slots[:] = _in_order(table.free_slots, set(range(table.max_requests)) - taken)


def _blocks(table: RequestTable, cached: Collection[int]) -> None:
    """Which blocks are held by requests, offers and arrivals, kept by the index, or in flight. All
    others are free."""
    references = Counter(b for request in table.live.values() for b in request.block_ids)
    holdings = table.holdings.values()
    references.update(b for holding in holdings for b in holding.block_ids)
    in_flight = {b for holding in holdings for b in holding.landing}
    _allocator(table.allocator, references, cached, in_flight)


def _allocator(
    allocator: BlockAllocator,
    references: Counter[int],
    cached: Collection[int],
    in_flight: set[int],
) -> None:
    total = allocator.total
    kept = bytearray(total)
    for block_id in cached:
        kept[block_id] = True
    held = {block_id for block_id in range(total) if references[block_id] or kept[block_id]}
    free = set(range(total)) - held - in_flight
    for block_id in free.difference(allocator._free):
        allocator._generations[block_id] += 1
    allocator._free = _in_order(allocator._free, free)
    allocator._references = [references[block_id] for block_id in range(total)]
    allocator._cached, allocator._in_flight = kept, in_flight
    allocator.cached = len(cached)
    idle = [block_id for block_id in cached if not references[block_id]]
    allocator.idle = len(idle)
    allocator.owners.recount(held | in_flight, idle)


def _in_order(listed: Iterable[int], free: set[int]) -> list[int]:
    """Free numbers: those that were in the list keep their order, the others are taken first."""
    known = [number for number in dict.fromkeys(listed) if number in free]
    return [*known, *sorted(free.difference(known), reverse=True)]


def _request(table: RequestTable, request: Request, *, is_rewritten: bool) -> None:
    """A live request. One whose slot was being overwritten, or whose blocks are cut but not its
    length, is torn."""
    schema = table.schema
    held = len(request.block_ids) * schema.block_tokens
    is_cut = bool(schema.bytes.block) and request.length > held
    if is_cut:
        table.numbers[LENGTH, request.slot] = held
    if is_cut or is_rewritten:
        request.lose_rings()
    request.reused_tokens = min(request.reused_tokens, held or request.reused_tokens)
    table.cut_shared_after(request)
    request.published_blocks = min(request.published_blocks, len(request.block_ids))
    if request.trail is not None and request.is_torn:
        request.trail.cut(request.length)
    request.mend()
