"""A process that owns requests and offers them, told what to do line by line: for tests."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.tiers.disk import DiskTier
from tests.support.handoff import PATIENT_S, assert_nothing_left, grown, handing, side, tidy
from tests.support.lives import Text, run_to
from tests.support.tiers import PATIENT

TOKENS = 900


class Owner:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        disk = options.pop("disk", None)
        tiers = [] if disk is None else [DiskTier(disk, 1 << 30, limits=PATIENT)]
        self.stack = side(name, tiers=tiers, **options)
        self.manager = self.stack.manager

    def offer(self, seed: int, length: int, *, keep: bool = False, **options: Any) -> str:
        request = grown(self.stack, Text.random(self.stack, seed, TOKENS), length)
        offer = self.manager.handoff.offer(request, **options)
        if not keep:
            self.manager.release_request(request)
        return offer.hex()

    def accept(self, offer: str, **options: Any) -> str:
        """It is a taker too: begins, and does not wait."""
        return repr(self.manager.handoff.accept(bytes.fromhex(offer), **options))

    def rewrite(self) -> int:
        """All that was offered is gone, and its memory is full of something else."""
        leases = handing(self.stack).leases
        for lease in tuple(leases.standing.values()):
            leases.withdraw(lease.name)
        for request in self.manager.requests:
            self.manager.release_request(request)
        tidy(self.manager)
        self.manager.prefix.evict()
        other = Text.random(self.stack, 999, TOKENS)
        request = self.manager.admit_request(other.ids[:800])
        run_to(self.stack, request, other, 800)
        self.manager.release_request(request)
        return self.manager.stats().blocks_total

    def drain(self) -> bool:
        return self.manager.tiers.drain(PATIENT_S)

    def held(self) -> int:
        tidy(self.manager)
        return len(handing(self.stack).leases.held)

    def check(self) -> bool:
        assert_nothing_left(self.stack)
        return True


def main() -> None:
    torch.set_num_threads(1)
    name, options = json.loads(sys.argv[1])
    owner = Owner(name, options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call, arguments = json.loads(line)
        try:
            answer = getattr(owner, call)(**arguments)
        except Dsv4Error as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
