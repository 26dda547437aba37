"""A process that accepts offers whose NIXL metadata was changed, byte by byte: for tests. It says
what came of each, and that an offer as it was made still comes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from dsv4.cache.handoff.offer import Offer
from dsv4.errors import OfferError
from tests.support.handoff import assert_nothing_left, close, grown, side
from tests.support.lives import Text, assert_cold

DEADLINE_S = 20.0


def main() -> None:
    torch.set_num_threads(1)
    owner, taker = side("prefill"), side("decode")
    text = Text.random(owner, 1, 300)
    request = grown(owner, text, 200)
    packed = owner.manager.handoff.offer(request, takers=1 << 20, lease_s=3600.0)
    offer = Offer.unpack(packed)
    print(json.dumps(len(offer.metadata)), flush=True)
    for at, flip in json.loads(sys.argv[1]):
        metadata = bytearray(offer.metadata)
        metadata[at % len(metadata)] ^= flip
        changed = replace(offer, metadata=bytes(metadata)).pack()
        try:
            copy = taker.manager.handoff.accept(changed, deadline_s=DEADLINE_S).wait()
        except OfferError as error:
            print(json.dumps([at, flip, str(error)]), flush=True)
        else:
            assert_cold(taker, copy, text.stream)
            taker.manager.release_request(copy)
            print(json.dumps([at, flip, "here"]), flush=True)
        taker.manager.prefix.evict()
    copy = taker.manager.handoff.accept(packed).wait()
    assert_cold(taker, copy, text.stream)
    assert_nothing_left(owner, taker)
    close(owner, taker)
    print(json.dumps("through"), flush=True)


if __name__ == "__main__":
    main()
