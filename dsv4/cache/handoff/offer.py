"""What an owner tells about a request: where its bytes lie, and what they are. Torch-free.

    offset  bytes  field                     offset  bytes  field
         0      8  magic                        136     32  root of the digests
         8      2  version                      168     32  digest of the state
        10      2  flags                        200     32  its parent: the last whole block's
        12      4  GPU of the blocks            232     64  pledge
        16      8  bytes of the offer           296      8  where the pledge lies
        24     16  epoch                        304      8  bytes of a block
        40      8  number of the offer          312      8  bytes of the state's payload
        48      8  tokens                       320   6·4   how many: blocks, pieces of the state,
        56      8  tokens of the prompt                     bytes of name, metadata, words, ids
        64     32  content fingerprint          344         the lists
        96     32  hash of the model_id         end-16  16  xxh3-128 of all before
       128      8  zeros

The lists, one after the other: per block its address (8 bytes) and its generation (8), the sums of
the blocks (16 each, if flag 2 is set), address and length of each piece of the state's record, the
link's name and metadata, words about the schema, and the token ids (4 each, if flag 1 is set).
Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsv4.errors import OfferError
from dsv4.tiers.record import DIGEST_BYTES, payload_sum

OFFER_VERSION = 1
MAGIC = b"\x89DSV4\r\n\1"
PLEDGE_BYTES = 64
EPOCH_BYTES = 16
SUM_BYTES = 16
_HAS_IDS, _HAS_SUMS, _ON_GPU = 1, 2, 4
_START = struct.Struct("<8sHHIQ")
_FIELDS = struct.Struct("<8sHHIQ16sQQQ32s32s8x32s32s32s64sQQQ6I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One request of one owner, as it was when it was offered. `root`, `prompt_tokens` and `ids`
    are None where the owner does not know the ids of its tokens; `sums` where the blocks are on a
    GPU, number `gpu`."""

    epoch: bytes
    number: int
    tokens: int
    prompt_tokens: int | None
    fingerprint: bytes
    model: bytes
    root: bytes | None
    state_digest: bytes
    state_parent: bytes
    state_bytes: int
    pledge: bytes
    pledge_at: int
    block_bytes: int
    gpu: int | None
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    sums: tuple[bytes, ...] | None
    state_pieces: tuple[tuple[int, int], ...]
    link: str
    metadata: bytes
    words: str
    ids: NDArray[np.int32] | None

    def pack(self) -> bytes:
        name, words = self.link.encode(), self.words.encode()
        ids = b"" if self.ids is None else self.ids.astype("<i4").tobytes()
        lists = b"".join(
            (
                np.array([self.rows, self.generations], dtype="<u8").tobytes(),
                b"".join(self.sums or ()),
                np.array(self.state_pieces, dtype="<u8").tobytes(),
                *(name, self.metadata, words, ids),
            )
        )
        flags = _HAS_IDS * (self.ids is not None) | _HAS_SUMS * (self.sums is not None)
        flags |= _ON_GPU * (self.gpu is not None)
        counts = (len(self.rows), len(self.state_pieces), len(name), len(self.metadata))
        fields = _FIELDS.pack(
            *(MAGIC, OFFER_VERSION, flags, self.gpu or 0),
            *(_FIELDS.size + len(lists) + SUM_BYTES, self.epoch, self.number, self.tokens),
            *(self.prompt_tokens or 0, self.fingerprint, self.model),
            *(self.root or bytes(DIGEST_BYTES), self.state_digest, self.state_parent),
            *(self.pledge, self.pledge_at, self.block_bytes, self.state_bytes),
            *(*counts, len(words), len(ids)),
        )
        packed = fields + lists
        return packed + payload_sum([memoryview(packed)])

    @staticmethod
    def unpack(packed: bytes) -> Offer:
        """Raises OfferError for anything but an offer of this version, whole and as it was made."""
        if not isinstance(packed, bytes | bytearray | memoryview):
            raise OfferError("damaged", f"an offer is bytes, not {type(packed).__name__}")
        packed = bytes(packed)
        if len(packed) < _FIELDS.size + SUM_BYTES or not packed.startswith(MAGIC):
            raise OfferError("damaged", f"these {len(packed)} bytes are not an offer, or cut short")
        _, version, flags, gpu, total = _START.unpack_from(packed)
        if version != OFFER_VERSION:
            raise OfferError(
                "version",
                f"the offer is of version {version}, this library reads {OFFER_VERSION}: run the "
                f"same version of dsv4 on both sides",
            )
        if total != len(packed):
            raise OfferError("damaged", f"{len(packed)} bytes of an offer of {total}")
        if packed[-SUM_BYTES:] != payload_sum([memoryview(packed)[:-SUM_BYTES]]):
            raise OfferError("damaged", "the sum of the offer is wrong: it was changed on its way")
        fields = _FIELDS.unpack_from(packed)
        epoch, number, tokens, prompt_tokens, fingerprint, model, root = fields[5:12]
        digest, parent, pledge, pledge_at, block_bytes, state_bytes = fields[12:18]
        blocks, pieces, name_bytes, metadata_bytes, word_bytes, id_bytes = fields[18:]
        has_sums, has_ids = bool(flags & _HAS_SUMS), bool(flags & _HAS_IDS)
        spans = [8 * blocks, 8 * blocks, SUM_BYTES * blocks * has_sums, 16 * pieces]
        spans += [name_bytes, metadata_bytes, word_bytes, id_bytes]
        if _FIELDS.size + sum(spans) + SUM_BYTES != total or id_bytes != 4 * tokens * has_ids:
            raise OfferError("damaged", "the lists of the offer do not add up to its length")
        cut, at = [], _FIELDS.size
        for span in spans:
            cut.append(packed[at : at + span])
            at += span
        listed = np.frombuffer(cut[3], "<u8").reshape(-1, 2)
        return Offer(
            epoch=epoch,
            number=number,
            tokens=tokens,
            prompt_tokens=prompt_tokens if has_ids else None,
            fingerprint=fingerprint,
            model=model,
            root=root if has_ids else None,
            state_digest=digest,
            state_parent=parent,
            state_bytes=state_bytes,
            pledge=pledge,
            pledge_at=pledge_at,
            block_bytes=block_bytes,
            gpu=gpu if flags & _ON_GPU else None,
            rows=tuple(np.frombuffer(cut[0], "<u8").tolist()),
            generations=tuple(np.frombuffer(cut[1], "<u8").tolist()),
            sums=tuple(cut[2][n : n + SUM_BYTES] for n in range(0, len(cut[2]), SUM_BYTES))
            if has_sums
            else None,
            state_pieces=tuple((start, span) for start, span in listed.tolist()),
            link=cut[4].decode(errors="replace"),
            metadata=cut[5],
            words=cut[6].decode(errors="replace"),
            ids=np.frombuffer(cut[7], "<i4").astype(np.int32) if has_ids else None,
        )


def model_hash(model_id: str) -> bytes:
    """What an offer says of the model: equal ones have equal weights."""
    text = model_id.encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"dsv4 model").digest()
