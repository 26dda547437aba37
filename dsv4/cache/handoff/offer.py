"""An owner's description of a request: where its bytes lie, and what they are. Torch-free.

    offset  bytes  field                     offset  bytes  field
         0      8  magic                        168     32  digest of the state
         8      2  version                      200     32  its parent: the last whole block's
        10      2  flags                        232     64  pledge
        12      4  GPU of the blocks            296      8  where the pledge lies
        16      8  bytes up to the signature    304      8  bytes of a block
        24     24  name of the offer            312      8  bytes of the state's payload
        48      8  tokens                       320   6·4   how many: blocks, pieces of the state,
        56      8  tokens of the prompt                     bytes of link, metadata, words, ids
        64     32  content fingerprint          344         the lists
        96     32  hash of the model_id                     the signature, if there is one
       128      8  bytes of a block's entries   end-16  16  xxh3-128 of all before
       136     32  root of the digests

The lists, one after the other: per block its address (8 bytes) and its generation (8), where
entries lie apart the address of those (8), the sums of the blocks (16 each, if flag 2 is set),
address and length of each piece of the state's record, the link's name and metadata, words about
the schema, and the token ids (4 each, if flag 1 is set).
Numbers are little-endian.

The name is a secret: anyone who knows it may report that the offer was taken. Version 1 had an
epoch and a count there, which could be guessed, and no signature. The checksum detects accidents; a
signature (`HandoffOptions.sign`), over everything before it, proves who made an offer. With a key
(`PrefixOptions.key`) its last 32 bytes are a MAC, and the sums of blocks are MACs too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsv4.errors import OfferError
from dsv4.tiers.record import DIGEST_BYTES, payload_sum

OFFER_VERSION = 2
MAGIC = b"\x89DSV4\r\n\1"
PLEDGE_BYTES = 64
NAME_BYTES = 24
SUM_BYTES = 16
# more than any valid offer has; NIXL and the taker's loops get nothing larger
MOST_BYTES = 1 << 27
MOST_TOKENS = 1 << 24
MOST_BLOCKS = 1 << 17
MOST_PIECES = 16
MOST_LINK_BYTES = 1024
MOST_METADATA_BYTES = 1 << 20
MOST_WORDS_BYTES = 4096
MOST_SIGNATURE_BYTES = 4096
_HAS_IDS, _HAS_SUMS, _ON_GPU = 1, 2, 4
_START = struct.Struct("<8sHHIQ")
_FIELDS = struct.Struct(f"<8sHHIQ{NAME_BYTES}sQQ32s32sQ32s32s32s64sQQQ6I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One request of one owner, as it was when it was offered. `root`, `prompt_tokens` and `ids`
    are None where the owner does not know the ids of its tokens; `sums` where the blocks are on a
    GPU, number `gpu`. Where entries are apart, `entries` are their addresses, in host memory.
    """

    name: bytes
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
    entries_bytes: int
    gpu: int | None
    rows: tuple[int, ...]
    entries: tuple[int, ...]
    generations: tuple[int, ...]
    sums: tuple[bytes, ...] | None
    state_pieces: tuple[tuple[int, int], ...]
    link: str
    metadata: bytes
    words: str
    ids: NDArray[np.int32] | None

    def pack(self, sign: Callable[[bytes], bytes] | None = None) -> bytes:
        """Its bytes, with what `sign` makes of those before the signature."""
        link, words = self.link.encode(), self.words.encode()
        ids = b"" if self.ids is None else self.ids.astype("<i4").tobytes()
        lists = b"".join(
            (
                np.array([*self.rows, *self.generations, *self.entries], dtype="<u8").tobytes(),
                b"".join(self.sums or ()),
                np.array(self.state_pieces, dtype="<u8").tobytes(),
                *(link, self.metadata, words, ids),
            )
        )
        flags = _HAS_IDS * (self.ids is not None) | _HAS_SUMS * (self.sums is not None)
        flags |= _ON_GPU * (self.gpu is not None)
        counts = (len(self.rows), len(self.state_pieces), len(link), len(self.metadata))
        fields = _FIELDS.pack(
            *(MAGIC, OFFER_VERSION, flags, self.gpu or 0),
            *(_FIELDS.size + len(lists), self.name, self.tokens),
            *(self.prompt_tokens or 0, self.fingerprint, self.model, self.entries_bytes),
            *(self.root or bytes(DIGEST_BYTES), self.state_digest, self.state_parent),
            *(self.pledge, self.pledge_at, self.block_bytes, self.state_bytes),
            *(*counts, len(words), len(ids)),
        )
        packed = fields + lists
        if sign is not None:
            packed += sign(packed)
        return packed + payload_sum([memoryview(packed)])

    @staticmethod
    def unpack(packed: bytes, verify: Callable[[bytes, bytes], bool] | None = None) -> Offer:
        """Raises OfferError for anything except a complete, unchanged offer of this version, and
        for one whose signature `verify` rejects."""
        if not isinstance(packed, bytes | bytearray | memoryview):
            raise OfferError("damaged", f"an offer is bytes, not {type(packed).__name__}")
        if len(packed) > MOST_BYTES:
            raise OfferError("damaged", f"{len(packed)} bytes, no offer has more than {MOST_BYTES}")
        packed = bytes(packed)
        if len(packed) < _FIELDS.size + SUM_BYTES or not packed.startswith(MAGIC):
            raise OfferError("damaged", f"these {len(packed)} bytes are not an offer, or cut short")
        _, version, flags, gpu, signed = _START.unpack_from(packed)
        if version != OFFER_VERSION:
            raise OfferError(
                "version",
                f"the offer is of version {version}, this library reads {OFFER_VERSION}: run the "
                f"same version of dsv4 on both sides",
            )
        signature_bytes = len(packed) - SUM_BYTES - signed
        if not 0 <= signature_bytes <= MOST_SIGNATURE_BYTES:
            raise OfferError("damaged", f"{len(packed)} bytes of an offer that says {signed}")
        if packed[-SUM_BYTES:] != payload_sum([memoryview(packed)[:-SUM_BYTES]]):
            raise OfferError("damaged", "the sum of the offer is wrong: it was changed on its way")
        if verify is not None and not verify(packed[:signed], packed[signed:-SUM_BYTES]):
            raise OfferError(
                "untrusted",
                f"the offer's signature of {signature_bytes} bytes is not accepted: its owner must "
                f"have the key that this side has (PrefixOptions.key, HandoffOptions.verify)",
            )
        fields = _FIELDS.unpack_from(packed)
        name, tokens, prompt_tokens, fingerprint, model, entries_bytes, root = fields[5:12]
        digest, parent, pledge, pledge_at, block_bytes, state_bytes = fields[12:18]
        blocks, pieces, link_bytes, metadata_bytes, word_bytes, id_bytes = fields[18:]
        for what, count, most in (
            ("tokens", tokens, MOST_TOKENS),
            ("blocks", blocks, MOST_BLOCKS),
            ("pieces of the state", pieces, MOST_PIECES),
            ("bytes of the link's name", link_bytes, MOST_LINK_BYTES),
            ("bytes of metadata", metadata_bytes, MOST_METADATA_BYTES),
            ("bytes of words", word_bytes, MOST_WORDS_BYTES),
        ):
            if count > most:
                raise OfferError("damaged", f"{count} {what} in an offer, at most {most} are read")
        has_sums, has_ids = bool(flags & _HAS_SUMS), bool(flags & _HAS_IDS)
        spans = [8 * blocks, 8 * blocks, 8 * blocks * bool(entries_bytes)]
        spans += [SUM_BYTES * blocks * has_sums, 16 * pieces]
        spans += [link_bytes, metadata_bytes, word_bytes, id_bytes]
        if _FIELDS.size + sum(spans) != signed or id_bytes != 4 * tokens * has_ids:
            raise OfferError("damaged", "the lists of the offer do not add up to its length")
        cut, at = [], _FIELDS.size
        for span in spans:
            cut.append(packed[at : at + span])
            at += span
        listed = np.frombuffer(cut[4], "<u8").reshape(-1, 2)
        return Offer(
            name=name,
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
            entries_bytes=entries_bytes,
            gpu=gpu if flags & _ON_GPU else None,
            rows=tuple(np.frombuffer(cut[0], "<u8").tolist()),
            generations=tuple(np.frombuffer(cut[1], "<u8").tolist()),
            entries=tuple(np.frombuffer(cut[2], "<u8").tolist()),
            sums=tuple(cut[3][n : n + SUM_BYTES] for n in range(0, len(cut[3]), SUM_BYTES))
            if has_sums
            else None,
            state_pieces=tuple((start, span) for start, span in listed.tolist()),
            link=_printable(cut[5]),
            metadata=cut[6],
            words=_printable(cut[7]),
            ids=np.frombuffer(cut[8], "<i4").astype(np.int32) if has_ids else None,
        )


def _printable(text: bytes) -> str:
    """For logs and errors, without control characters from another machine."""
    return "".join(c if c.isprintable() else "?" for c in text.decode(errors="replace"))


def model_hash(model_id: str) -> bytes:
    """How an offer identifies the model: equal hashes mean equal weights."""
    text = model_id.encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"dsv4 model").digest()
