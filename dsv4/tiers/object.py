"""Object storage as a tier: S3 and compatible stores. Torch-free. Needs the extra `object`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from dsv4.errors import InvalidInput
from dsv4.extras import needed_by
from dsv4.tiers.record import RECORD_VERSION, Key, Kind, Label, Record
from dsv4.tiers.tier import DONE, DROPPED, MISSING, Limits, Outcome, QueuedTier, wrong_size

RETRIES = 3  # of a request, with jitter, as long as it can still end before the deadline
FIRST_ASKED, ASKED_AT_ONCE = 2, 64  # blocks of a prompt: few after a miss, many along a hit
MOST_LISTED = 1000  # the most that one answer of S3 has


class ObjectTier(QueuedTier):
    """Records as objects of a bucket, whose `url` is like `s3://bucket/prefix`: one per record,
    named by its key.

    `config` is obstore's (endpoint, region, access_key_id, …); what it leaves out comes from the
    environment. `allow_http` lets an endpoint do without TLS. `name` is the tier's in statistics,
    `limits` what may wait. An object is never overwritten. The tier has no capacity: the bucket's
    lifecycle rules remove what is old. A request that the server could not answer is repeated a few
    times, with jitter, and still ends with the deadline. Raises InvalidInput for a URL that obstore
    does not know, MissingExtra without obstore.

    Blocks of a prompt are looked for in growing numbers, up to the first that is missing. Each
    state has an empty object next to it with the name of the block before it, so that one listing
    finds which states there are after a block.
    """

    look_chunk = 1 << 30  # one job

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Any] | None = None,
        allow_http: bool = False,
        name: str = "object",
        limits: Limits | None = None,
    ) -> None:
        if limits is None:
            limits = Limits(threads=8, deadline_s=20.0)
        super().__init__(name, limits)
        self._obstore = obstore = _obstore()
        # the last repetition begins after 4 + 1 tenths of the deadline, and takes 5
        tenth = timedelta(seconds=limits.deadline_s) / 10
        try:
            self._bucket = obstore.store.from_url(
                url,
                config=dict(config or {}),
                client_options={
                    "allow_http": allow_http,
                    "timeout": 5 * tenth,
                    "connect_timeout": 5 * tenth,
                },
                retry_config={
                    "max_retries": RETRIES,
                    "retry_timeout": 4 * tenth,
                    "backoff": {
                        "init_backoff": min(timedelta(milliseconds=50), tenth / 4),
                        "max_backoff": tenth,
                        "base": 2,
                    },
                },
            )
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise InvalidInput(f"{url!r} is not a place for objects: {error}") from error
        place = urlsplit(url)
        self._where = f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        # requests in sequence, each of them in time, may together take as long as they need
        within = asyncio.wait_for(self._look_through(labels), self._limits.deadline_s)
        return asyncio.run(within)

    async def _look_through(self, labels: Sequence[Label]) -> list[bool]:
        there: set[Key] = set()
        prompts = list(_in_order(labels))
        alone = [blocks[0] for blocks in prompts if len(blocks) == 1]
        alone = await self._without_unlisted_states(alone)
        for first in range(0, len(alone), ASKED_AT_ONCE):
            there |= await self._ask(alone[first : first + ASKED_AT_ONCE])
        for blocks in prompts:
            first, count = 0, FIRST_ASKED
            while len(blocks) > 1 and first < len(blocks):
                some = blocks[first : first + count]
                found = await self._ask(some)
                there |= found
                if len(found) < len(some):
                    break
                first, count = first + count, min(4 * count, ASKED_AT_ONCE)
        return [label.key in there for label in labels]

    async def _ask(self, labels: Sequence[Label]) -> set[Key]:
        """Which of these are there. All are asked for at once."""
        heads = [self._obstore.head_async(self._bucket, str(label.key)) for label in labels]
        answers = await asyncio.gather(*heads, return_exceptions=True)
        there = set()
        for label, answer in zip(labels, answers, strict=True):
            with self._answering():
                if not isinstance(answer, BaseException):
                    there.add(label.key)
                elif not isinstance(answer, FileNotFoundError):
                    raise answer
        return there

    async def _without_unlisted_states(self, labels: Sequence[Label]) -> list[Label]:
        """Of the states after one block, those whose names a listing has; the rest unchanged."""
        groups: dict[bytes, list[Label]] = {}
        for label in labels:
            if label.kind is Kind.STATE:
                groups.setdefault(label.parent, []).append(label)
        unlisted: set[Label] = set()
        for parent, states in groups.items():
            if len(states) <= FIRST_ASKED:
                continue
            names = await self._listed(parent)
            if len(names) < MOST_LISTED:  # otherwise there are more, and each is asked for
                # the first, which a resumed request asks for, may be older than listings are
                unlisted.update(each for each in states[1:] if each.digest.hex() not in names)
        return [label for label in labels if label not in unlisted]

    async def _listed(self, parent: bytes) -> set[str]:
        """The first names of states after a block."""
        with self._answering():
            found = self._obstore.list(self._bucket, _behind(parent), chunk_size=MOST_LISTED)
            async for objects in found:
                return {each["path"].rpartition("/")[2] for each in objects}
        return set()

    def _exists(self, key: Key) -> bool:
        with self._answering():
            try:
                self._obstore.head(self._bucket, str(key))
            except FileNotFoundError:
                return False
        return True

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._get(record) for record in records]

    def _get(self, record: Record) -> Outcome:
        with self._answering():
            try:
                answer = self._obstore.get(self._bucket, str(record.key))
            except FileNotFoundError:
                return MISSING
            asked, found = record.label.record_bytes, answer.meta["size"]
            if found != asked:
                return wrong_size(found, asked)
            data, at = np.frombuffer(answer.bytes(), np.uint8), 0
        for piece in record.parts.pieces:
            np.copyto(np.frombuffer(piece, np.uint8), data[at : at + piece.nbytes])
            at += piece.nbytes
        return DONE

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._put(record) for record in records]

    def _put(self, record: Record) -> Outcome:
        label, pieces = record.label, list(record.parts.pieces)
        if not self._create(str(label.key), pieces) and not self._exists(label.key):
            return DROPPED  # S3 also answers 409 while another client's request is being processed
        if label.kind is Kind.STATE:
            self._create(f"{_behind(label.parent)}/{label.digest.hex()}", [])
        return DONE

    def _create(self, path: str, pieces: list[memoryview]) -> bool:
        """Whether it was not there. If it was, that may be the store's word only."""
        with self._answering():
            try:
                self._obstore.put(self._bucket, path, pieces or b"", mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._answering():
            self._obstore.delete(self._bucket, [str(key) for key in keys])

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Treats anything obstore raises as a failure of this request, except what callers
        expect."""
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise OSError(str(error).partition("\n")[0]) from error


def _in_order(labels: Sequence[Label]) -> Iterator[list[Label]]:
    """Splits labels into prompts: consecutive blocks together, everything else alone."""
    prompt: list[Label] = []
    for label in labels:
        follows = prompt and label.kind is Kind.BLOCK and label.leans_on == prompt[-1].key
        if prompt and not follows:
            yield prompt
            prompt = []
        prompt.append(label)
    if prompt:
        yield prompt


def _behind(parent: bytes) -> str:
    """Where the names of states are that continue from a block."""
    return f"dsv4/{RECORD_VERSION}/behind/{parent.hex()}"


def _obstore() -> Any:
    with needed_by("the object tier"):
        import obstore
        import obstore.exceptions
        import obstore.store
    return obstore
