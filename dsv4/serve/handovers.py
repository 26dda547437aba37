"""Jobs that go from one server to another with their cache: offered by the one that ran the prompt,
accepted by the one that continues. docs/distributed.md.

A job that is expected waits until its request has arrived. One that does not arrive is computed,
like every other job: the hand-off only saves time. What is not marked otherwise runs in
the thread that steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from dsv4.cache.handoff.arrival import Arrival
from dsv4.cache.manager import KVCacheManager
from dsv4.engine import Job
from dsv4.errors import Dsv4Error, InvalidInput, OfferError, OutOfBlocks, OutOfSlots, RequestError
from dsv4.serve.generation import Generation

LOGGER = logging.getLogger("dsv4.serve")


class Handovers:
    """Of one manager. Jobs are known by their `data`, before and after they are submitted."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._leaving: dict[Generation, bytes | None] = {}  # and the offer, once it is made
        self._expected: dict[Generation, bytes] = {}  # offers that are not accepted yet
        self._arriving: dict[Generation, Arrival] = {}

    # ---- calls from any thread, before the job is submitted

    def offer_when_done(self, generation: Generation) -> None:
        """Its job's request is offered when the job has ended as it was asked to: `offer` has it
        then."""
        self._leaving[generation] = None

    def expect(self, generation: Generation, offer: bytes) -> None:
        """Its job's request comes from another manager, which has made this offer."""
        self._expected[generation] = offer

    def forget(self, generation: Generation) -> None:
        """Its job was not submitted."""
        self._leaving.pop(generation, None)
        self._expected.pop(generation, None)

    # ---- in the thread that steps

    def offer(self, generation: Generation) -> bytes | None:
        """What was made of an ended job, once; None if it could not be offered."""
        return self._leaving.pop(generation, None)

    def expects(self, job: Job) -> bool:
        """Whether a job waits for its request."""
        return job.data in self._expected or job.data in self._arriving

    def land(self, jobs: Sequence[Job], running: int) -> None:
        """Accepts what there is room for, and gives jobs the requests that have arrived."""
        for job in jobs:
            offer = self._expected.get(job.data)
            if offer is not None and not job.is_over and self._has_room(job, running):
                self._accept(job, offer)
            arrival = self._arriving.get(job.data)
            if arrival is None or job.is_over or not arrival.poll():
                continue
            del self._arriving[job.data]
            if arrival.request is None:
                LOGGER.warning("a request did not arrive and is computed: %s", arrival.error)
            elif not _is_of(arrival, job):
                LOGGER.warning("a request of other tokens has arrived: its job is computed")
                self._manager.release_request(arrival.request)
            else:
                job.request = arrival.request
                job.tokens_skipped = arrival.request.length

    def _has_room(self, job: Job, running: int) -> bool:
        """As for a prompt that is admitted: each running job may need a block soon."""
        assert job.prompt is not None
        stats = self._manager.stats()
        spare = stats.blocks_free + stats.blocks_evictable - running
        return bool(stats.slots_free) and self._manager.room.needed_blocks(job.prompt) <= spare

    def _accept(self, job: Job, offer: bytes) -> None:
        try:
            arrival = self._manager.handoff.accept(offer, hints=job.hints)
        except (OutOfBlocks, OutOfSlots):
            return  # later, while the offer stands
        except Dsv4Error as error:
            LOGGER.warning("a request was not accepted and is computed: %s", error)
        else:
            self._arriving[job.data] = arrival
        del self._expected[job.data]

    def leave(self, job: Job) -> None:
        """The job gives its memory back."""
        self._expected.pop(job.data, None)
        arrival = self._arriving.pop(job.data, None)
        if arrival is not None:
            arrival.cancel()
        if job.data not in self._leaving or job.request is None or not job.is_over:
            return
        if job.cancelled or job.error is not None or job.is_stopped:
            return
        with suppress(OfferError, RequestError, InvalidInput):  # it is computed where it goes
            self._leaving[job.data] = self._manager.handoff.offer(job.request)


def _is_of(arrival: Arrival, job: Job) -> bool:
    """Whether what has arrived is what the job's tokens and salt give: an offer says which it is
    of, and one may reach the wrong job."""
    assert arrival.request is not None
    assert job.prompt is not None
    length, has, wanted = arrival.request.length, arrival.trail, job.prompt.trail
    if has is None or wanted is None or length >= len(job.tokens):
        return False
    return has.root == wanted.root and has.ids[:length].tolist() == job.tokens[:length]
