"""Object storage as a tier: S3 and what speaks like it. Torch-free. Needs the extra `object`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np

from dsv4.errors import InvalidInput, MissingExtra
from dsv4.tiers.record import Key, Label, Record
from dsv4.tiers.tier import DONE, MISSING, Limits, Outage, Outcome, QueuedTier, wrong_size


class ObjectTier(QueuedTier):
    """Records as objects of a bucket, `s3://bucket/prefix`: one per record, named by its key.

    `config` is obstore's (endpoint, region, access_key_id, …); what it leaves out comes from the
    environment. An object is never overwritten. There is no capacity: the bucket's lifecycle rules
    take away what is old. Requests are not repeated and end with the deadline. Raises InvalidInput
    for a place that obstore does not know, MissingExtra without obstore.
    """

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Any] | None = None,
        allow_http: bool = False,
        name: str = "object",
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits(threads=8, deadline_s=20.0)
        super().__init__(name, limits)
        self._obstore = obstore = _obstore()
        deadline = timedelta(seconds=limits.deadline_s)
        try:
            self._bucket = obstore.store.from_url(
                url,
                config=dict(config or {}),
                client_options={
                    "allow_http": allow_http,
                    "timeout": deadline,
                    "connect_timeout": deadline,
                },
                retry_config={"max_retries": 0, "retry_timeout": deadline},
            )
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise InvalidInput(f"{url!r} is no place for objects: {error}") from error

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        return [self._exists(label.key) for label in labels]

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
        for record in records:
            pieces = list(record.parts.pieces)
            with self._answering(), suppress(self._obstore.exceptions.AlreadyExistsError):
                self._obstore.put(self._bucket, str(record.key), pieces, mode="create")
        return [DONE] * len(records)

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._answering():
            self._obstore.delete(self._bucket, [str(key) for key in keys])

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Whatever obstore raises is an outage, but for what its callers expect."""
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise Outage(str(error).partition("\n")[0]) from error


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingExtra(
            f"the object tier needs obstore ({error}): install it with pip install 'dsv4[object]'"
        ) from error
    return obstore
