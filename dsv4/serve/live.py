"""The cache as a page shows it: a snapshot, and changes of it as events.

    /cache/state     everything, taken between two steps
    /cache/events    first the same; then at most `RATE_HZ` times a second the counters, and every
                     request that runs; the turns that have ended, and then the tree

With no watcher a step costs nothing here. With any it costs a copy of counters, `RATE_HZ` times a
second at most, and of the newest part of the tree when a turn has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from dsv4.cache.prefix.node import PrefixNode
from dsv4.engine import Job
from dsv4.serve.failures import ApiError
from dsv4.serve.generation import Generation
from dsv4.serve.runner import Runner

RATE_HZ = 10.0
# of the time of the thread that steps, and of its processor time, of which a busy machine leaves it
# less; events of a large cache come less often
MOST_SHARE = 0.01
MOST_NODES = 512  # of the tree in a snapshot, the newest
MOST_TURNS = 64
MOST_BLOCKS = 2048  # of a request, and of those with entries in host memory: as the page draws
MOST_BEHIND = 32  # events that wait for a slow watcher; then it gets a whole snapshot instead
MOST_WATCHERS = 16
PATIENCE_S = 30.0  # that a watcher may read nothing


class Live:
    """`state` and what it calls run in the thread that steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._turns: deque[dict[str, Any]] = deque(maxlen=MOST_TURNS)
        self._watchers: set[Watcher] = set()
        self._last_s, self._interval_s, self._is_due = 0.0, 1 / RATE_HZ, False
        self._rested_s = 0.0  # processor time of the thread when it may make the next event
        self._key = secrets.token_bytes(16)
        self._new_turns: list[dict[str, Any]] = []
        runner.after_step.append(self._after_step)
        runner.after_turn.append(self._note_turn)

    # ---- in the thread that steps

    def state(self) -> dict[str, Any]:
        """Everything, with the newest `MOST_NODES` blocks of the tree."""
        return {
            **self.counters(),
            "model": self._shape(),
            "tree": self.tree(),
            "turns": [*self._turns],
        }

    def counters(self) -> dict[str, Any]:
        """What changes with each step."""
        runner, manager = self._runner, self._runner.manager
        stats = manager.stats()
        jobs = tuple(runner.engine.jobs)
        found: dict[str, Any] = {
            "time": time.time(),
            "step": runner.engine.steps,
            "tokens_per_s": round(runner.tokens_per_s, 3),
            "blocks": {
                "total": stats.blocks_total,
                "free": stats.blocks_free,
                "live": stats.blocks_live,
                "cached": stats.blocks_cached,
                "in_flight": stats.blocks_in_flight,
                "pinned": stats.blocks_pinned,
            },
            "slots": {"total": stats.slots_total, "free": stats.slots_free},
            "requests": [self._request(job) for job in jobs if job.request is not None],
            "waiting": sum(job.request is None for job in jobs),
            "tiers": [
                {
                    "name": tier.name,
                    "held_bytes": tier.held_bytes,
                    "capacity_bytes": tier.capacity_bytes,
                    "hits": tier.hits,
                    "misses": tier.misses,
                    "stored": tier.stored,
                }
                for tier in stats.tiers
            ],
        }
        residency = manager._parts.residency
        if residency is not None and stats.residency is not None:
            away, entries = residency.places.in_host_only, stats.residency
            found["blocks"]["in_host_memory"] = len(away)
            found["entries"] = {
                "host_bytes": entries.host_bytes,
                "rows_total": entries.rows_total,
                "rows_free": entries.rows_free,
                "hits": entries.hits,
                "misses": entries.misses,
                "bytes_fetched": entries.bytes_fetched,
                "in_host_memory": away[:MOST_BLOCKS],
            }
        if stats.prefix is not None:
            prefix = stats.prefix
            found["prefix"] = {
                "hits": dict(prefix.hits),
                "misses": dict(prefix.misses),
                "tokens_asked": prefix.tokens_asked,
                "tokens_skipped": prefix.tokens_skipped,
                "snapshots": prefix.snapshots_used,
                "evictions": prefix.block_evictions,
            }
        return found

    def _request(self, job: Job) -> dict[str, Any]:
        """What a request holds: its window, the tokens of groups that have not closed yet, and its
        entries, of each ratio."""
        request, schema = job.request, self._runner.manager.schema
        assert request is not None
        length, data = request.length, job.data
        ratios = sorted({layer.spec.ratio for layer in schema.layers if layer.spec.ratio})
        return {
            "number": data.number,
            "session": self._alias(data.terms.session),
            "prompt_tokens": job.prompt_tokens,
            "cached_tokens": job.tokens_skipped,
            "generated_tokens": len(job.generated),
            "length": length,
            "preemptions": job.preemptions,
            "window": [max(0, length - schema.model.window), length],
            "groups": [
                {"ratio": ratio, "entries": length // ratio, "unfinished_tokens": length % ratio}
                for ratio in ratios
            ],
            "blocks": list(request.block_ids[:MOST_BLOCKS]),
        }

    def tree(self) -> dict[str, Any]:
        """Cached blocks and what comes before each, parents first."""
        prefix = self._runner.manager._parts.prefix
        if not prefix:
            return {"blocks": 0, "nodes": []}
        nodes = prefix.index.newest(MOST_NODES)
        return {"blocks": len(prefix.index), "nodes": [_node(node) for node in nodes]}

    def _shape(self) -> dict[str, Any]:
        schema = self._runner.manager.schema
        return {
            "block_tokens": schema.block_tokens,
            "block_bytes": schema.bytes.block,
            "slot_bytes": schema.bytes.slot,
            "max_context": schema.max_context,
            "window": schema.model.window,
        }

    def _alias(self, session: str) -> str:
        """A name that says which turns belong together, and nothing else: sessions contain salts,
        which are for their tenants alone."""
        named = hashlib.blake2b(session.encode(errors="surrogatepass"), key=self._key)
        return named.hexdigest()[:8]

    def _note_turn(self, job: Job) -> None:
        data: Generation = job.data
        turn = {
            "number": data.number,
            "session": self._alias(data.terms.session),
            "prompt_tokens": job.prompt_tokens,
            "hit_tokens": job.tokens_skipped,
            "missed_tokens": job.prompt_tokens - job.tokens_skipped,
            "host_tokens": data.host_tokens,
            "storage_tokens": data.storage_tokens,
            "generated_tokens": len(job.generated),
        }
        if data.explanation is not None:  # the kind alone: not everybody who watches shares a salt
            turn["missed_because"] = data.explanation.kind
        self._turns.append(turn)
        if self._watchers:
            self._new_turns.append(turn)

    def _after_step(self) -> None:
        """Sends an event if one is due. What changes before the next is due goes into that one;
        after the last step of all, a timer sends it."""
        if not self._watchers:
            return
        is_last = not self._runner.engine.jobs
        if self._early_s <= 0 and (is_last or time.thread_time() >= self._rested_s):
            self._send_changes()
        elif is_last and not self._is_due:
            self._is_due = True
            self._send_later()

    @property
    def _early_s(self) -> float:
        return self._last_s + self._interval_s - time.monotonic()

    def _send_later(self) -> None:
        loop, call = self._runner.loop, self._runner.call
        if loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(loop.call_later, self._early_s, call, self._send_due)

    def _send_due(self) -> None:
        """Sends the event that was due, unless a step has done so in the meantime."""
        if self._is_due and self._early_s > 0:
            self._send_later()
        elif self._is_due:
            self._send_changes()

    def _send_changes(self) -> None:
        begun_s = time.thread_time()
        self._is_due, self._last_s = False, time.monotonic()
        turns, self._new_turns = self._new_turns, []
        event = {**self.counters(), "turns": turns}
        if turns or not self._runner.engine.jobs:
            event["tree"] = self.tree()
        self._send(event)
        ended_s = time.thread_time()
        rest_s = (ended_s - begun_s) / MOST_SHARE
        self._interval_s, self._rested_s = max(1 / RATE_HZ, rest_s), ended_s + rest_s

    def _send(self, event: dict[str, Any]) -> None:
        text = json.dumps(event)
        loop = self._runner.loop
        if loop is None:
            return
        for watcher in tuple(self._watchers):
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(watcher.put, text)

    # ---- in the event loop

    async def watch(self) -> AsyncIterator[str]:
        """Server-sent events, until the client goes or the server drains."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            first = await asyncio.wrap_future(self._runner.call(self.state))
            yield f"event: state\ndata: {json.dumps(first)}\n\n"
            while not self._runner.is_draining:
                try:
                    async with asyncio.timeout(1.0):
                        text = await watcher.queue.get()
                except TimeoutError:
                    yield ": nothing new\n\n"
                    continue
                if watcher.lost:
                    watcher.clear()
                    whole = await asyncio.wrap_future(self._runner.call(self.state))
                    yield f"event: state\ndata: {json.dumps(whole)}\n\n"
                    continue
                yield f"event: step\ndata: {text}\n\n"
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._new_turns.clear()

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= MOST_WATCHERS


class WatchedStream(StreamingResponse):
    """Server-sent events as long as they are read. A client that reads nothing for `PATIENCE_S`
    is cut off: there is room for `MOST_WATCHERS`, and this request has no limit of time."""

    def __init__(self, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await send(message)
            except TimeoutError:
                raise ApiError(504, f"nothing was read for {PATIENCE_S:g} s") from None

        await super().__call__(scope, receive, send_soon)


class Watcher:
    """What one client has yet to read: a few events, or the fact that some were lost."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue(MOST_BEHIND)
        self.lost = 0

    def put(self, text: str) -> None:
        try:
            self.queue.put_nowait(text)
        except asyncio.QueueFull:
            self.lost += 1

    def clear(self) -> None:
        self.lost = 0
        while not self.queue.empty():
            self.queue.get_nowait()


def _node(node: PrefixNode) -> dict[str, Any]:
    return {
        "id": node.digest.hex()[:16],
        "parent": None if node.parent is None else node.parent.digest.hex()[:16],
        "block_id": node.block_id,
        "depth": node.depth,
        "children": node.children,
        "snapshot": node.snapshot is not None,
        "pinned": node.pins > 0,
        "stored": node.stored,
    }
