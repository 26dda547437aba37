"""A key, and what it makes: names that cannot be computed without it, and proofs of who wrote a
record or an offer. Torch-free.

The key itself does nothing. Each use has a key of its own, derived from it, so that what one use
shows is of no help for another. No repr, error or log line has any of them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsv4.errors import CopyError, InvalidInput
from dsv4.extras import needed_by

LEAST_BYTES, MOST_BYTES = 16, 64  # of a key; BLAKE2b takes no longer one
MAC_BYTES = 32
SUM_BYTES = 16
SALT_BYTES, TAG_BYTES = 24, 16
BOX_BYTES = SALT_BYTES + TAG_BYTES  # what decryption needs in addition to the key
_NONCE = bytes(12)


class Secret:
    """What a manager with `PrefixOptions(key=...)` computes with. Two of the same key are equal in
    all that they make."""

    __slots__ = (
        "_chain",
        "_cipher",
        "_offers",
        "_records",
        "_root",
        "_sums",
        "encrypts",
        "identity",
    )

    def __init__(self, key: bytes, *, encrypts: bool = False) -> None:
        """With `encrypts` records are encrypted where they leave the process. Those that are
        encrypted can be read without it. Raises InvalidInput, MissingExtra."""
        require_key(key)
        self.encrypts, self._cipher = encrypts, _derived(key, b"cipher")
        if encrypts:
            _aes()
        # a copy of a running hash costs less than a new one with a key
        self._chain = hashlib.blake2b(key=_derived(key, b"chain"), digest_size=32)
        self._root, self._records = _derived(key, b"root"), _derived(key, b"records")
        self._offers, self._sums = _derived(key, b"offers"), _derived(key, b"sums")
        # says which key it is and nothing about it
        self.identity = _derived(key, b"identity").hex()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str:
        raise CopyError("a secret is not copied or pickled: make it from the key")

    def link(self, digest: bytes, span: memoryview | bytes) -> bytes:
        """The digest after this one. Without the key, that one and the tokens are not enough."""
        running = self._chain.copy()
        running.update(digest)
        running.update(span)
        return running.digest()

    def root(self, public: bytes) -> bytes:
        """Where chains start that would start at `public` without a key."""
        return hashlib.blake2b(public, key=self._root, digest_size=32).digest()

    def record_mac(self, pieces: Iterable[memoryview | bytes]) -> bytes:
        return _mac(self._records, pieces, MAC_BYTES)

    def offer_mac(self, packed: bytes) -> bytes:
        return _mac(self._offers, [packed], MAC_BYTES)

    def sum(self, block: Sequence[memoryview]) -> bytes:
        """Takes the place of a checksum of a block that another machine reads."""
        return _mac(self._sums, block, SUM_BYTES)

    def encrypt(self, digest: bytes, payload: memoryview | bytes) -> tuple[bytes, bytes]:
        """The encrypted payload, and what `decrypt` needs. Each call has a key of its own, so its
        nonce need not be kept."""
        salt = os.urandom(SALT_BYTES)
        sealed = _aes().AESGCM(self._key_of(digest, salt)).encrypt(_NONCE, payload, None)
        return sealed[:-TAG_BYTES], salt + sealed[-TAG_BYTES:]

    def decrypt(
        self, digest: bytes, pieces: Iterable[memoryview | bytes], box: bytes
    ) -> Iterator[bytes]:
        """The payload, piece by piece. Raises ValueError after the last one if it was changed:
        nothing of it may be used before."""
        aes = _aes()
        key, tag = self._key_of(digest, box[:SALT_BYTES]), box[SALT_BYTES:]
        running = aes.Cipher(aes.AES(key), aes.GCM(_NONCE, tag)).decryptor()
        for piece in pieces:
            yield running.update(piece)
        try:
            running.finalize()
        except aes.InvalidTag:
            raise ValueError("changed") from None

    def _key_of(self, digest: bytes, salt: bytes) -> bytes:
        return _mac(self._cipher, [salt, digest], 32)


def _aes() -> Any:
    """What is used of cryptography. Raises MissingExtra."""
    with needed_by("encryption"):
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    return SimpleNamespace(InvalidTag=InvalidTag, Cipher=Cipher, AESGCM=AESGCM, AES=AES, GCM=GCM)


def _derived(key: bytes, use: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=32, person=b"dsv4 " + use).digest()


def _mac(key: bytes, pieces: Iterable[memoryview | bytes], size_bytes: int) -> bytes:
    running = hashlib.blake2b(key=key, digest_size=size_bytes)
    for piece in pieces:
        running.update(piece)
    return running.digest()


same = hmac.compare_digest  # in a time that says nothing about where two differ


def require_key(key: object) -> None:
    """Raises InvalidInput, without showing it."""
    if not isinstance(key, bytes):
        raise InvalidInput(
            f"key is {type(key).__name__}: give bytes, as read_key(file=...) reads them"
        )
    if not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise InvalidInput(
            f"key has {len(key)} bytes: give {LEAST_BYTES} to {MOST_BYTES} random ones, for "
            f"instance of openssl rand -hex 32 and read_key"
        )


def read_key(*, file: str | Path | None = None, environment: str | None = None) -> bytes:
    """A key from a file or an environment variable: 32 to 128 hexadecimal digits, as `openssl rand
    -hex 32` writes them. The file must be yours alone (mode 600). Raises InvalidInput, without
    showing what was found."""
    if (file is None) == (environment is None):
        raise InvalidInput("say where the key is: read_key(file=...) or read_key(environment=...)")
    if environment is not None:
        where, text = f"environment variable {environment}", os.environ.get(str(environment))
        if text is None:
            raise InvalidInput(f"{where} is not set: it must have the key as hexadecimal digits")
    else:
        assert file is not None
        where, text = str(file), _read(Path(file))
    if not re.fullmatch(r"([0-9a-fA-F]{2}){16,64}", text.strip()):
        raise InvalidInput(
            f"{where} has {len(text.strip())} characters that are not a key: it must be 32 to 128 "
            f"hexadecimal digits, as openssl rand -hex 32 writes them"
        )
    return bytes.fromhex(text.strip())


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(4 * MOST_BYTES)
    except OSError as error:
        raise InvalidInput(f"the key file {path} cannot be read: {error.strerror}") from error
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
        raise InvalidInput(
            f"the key file {path} has mode {stat.S_IMODE(found.st_mode):o}: others may read it; "
            f"make a new key, with mode 600"
        )
    return data.decode(errors="replace")
