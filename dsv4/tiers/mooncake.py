"""Mooncake Store as a tier: memory of many machines. Torch-free. Needs the extra `mooncake`.

Its answers are hints. A put that returns 0 may have stored nothing (another writer's put is
pending, or was when that writer died), and its data have no checksum once they were on disk. So
what is there is asked again, and what is loaded is checked as everywhere.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4.errors import InvalidInput, MissingExtra, require_count, require_type
from dsv4.tiers.record import Key, Label, Record, Region, address
from dsv4.tiers.tier import DONE, DROPPED, MISSING, Limits, Outage, Outcome, QueuedTier, wrong_size

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

log = logging.getLogger("dsv4.tiers")
_RPC_FAILED = -900  # the master does not answer
_SIZE_DIFFERS = (-600, -800)  # codes for an object of another size, among other errors
_LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own buffer; records do not pass through it


class MooncakeTier(QueuedTier):
    """Records in the memory of the machines of one Mooncake `master`, host:port.

    `segment_bytes` is the memory that this process contributes to the store; with 0 it only uses
    that of others. `host` is the address at which other machines reach this process; `metadata`,
    `protocol` and `devices` are Mooncake's own. `name` is the tier's in statistics, `limits` what
    may wait. It binds
    nothing: Mooncake listens on every interface, asks for no password, and has access to the
    registered memory; a warning says so when it begins to listen.

    A master that cannot be reached is an outage, at the start too: the tier tries again after it
    has backed off. Raises MissingExtra without Mooncake or the two libraries that it is linked to.
    """

    chunk = 256
    encrypts = False  # it sends what lies in registered memory

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int = 0,
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        name: str = "mooncake",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(name, Limits(threads=3) if limits is None else limits)
        self._client_class = _client_class()
        for option, value in (("host", host), ("metadata", metadata), ("protocol", protocol)):
            require_type(option, value, str)
        require_type("devices", devices, str)
        segment_bytes = require_count("segment_bytes", segment_bytes, at_least=0)
        address_of = re.fullmatch(r".+:([0-9]{1,5})", master) if isinstance(master, str) else None
        if address_of is None or not 0 < int(address_of[1]) < 1 << 16:
            raise InvalidInput(f"master={master!r}: give its address as host:port")
        self._where = master
        self._master, buffer = master, _LOCAL_BUFFER_BYTES
        self._setup = (host, metadata, segment_bytes, buffer, protocol, devices, master)
        self._connecting = threading.Lock()
        self._client: MooncakeDistributedStore | None = None
        self._regions: list[Region] = []
        self._spans: list[tuple[int, int]] = []  # of the regions, as addresses
        self._known = 0  # regions that the client knows

    def register(self, region: Region) -> None:
        start = address(region.memory)
        with self._lock:
            self._regions.append(region)
            self._spans.append((start, start + region.memory.nbytes))

    def _require(self, records: Sequence[Record]) -> None:
        for record in records:
            for piece in record.parts.pieces:
                start = address(piece)
                if not any(a <= start and start + piece.nbytes <= b for a, b in self._spans):
                    raise InvalidInput(
                        f"{piece.nbytes} bytes of {record.key} lie in no region that tier "
                        f"{self.name} knows: register the memory first"
                    )

    def _connected(self) -> Any:
        """The client, with all regions registered. Raises Outage, OSError."""
        if not self._connecting.acquire(timeout=self._limits.deadline_s):
            raise Outage("another thread still waits for Mooncake's set-up")
        try:
            if self._client is None:
                self._knock()
                client = self._client_class()
                code = client.setup(*self._setup)
                if code:
                    raise Outage(f"no Mooncake master at {self._master} (code {code})")
                self._client, self._known = client, 0
                self._at_end(client.close)
                log.warning(
                    "tier %s: Mooncake listens on every interface of this machine, whatever host "
                    "is, and asks for no password: who reaches its ports can read and write the "
                    "memory that it knows; let a firewall keep them to machines that you trust",
                    self.name,
                )
            while self._known < len(self._spans):
                start, end = self._spans[self._known]
                code = self._client.register_buffer(start, end - start)
                if code:
                    raise Outage(f"Mooncake does not take {end - start:,} bytes (code {code})")
                self._known += 1
            return self._client
        finally:
            self._connecting.release()

    def _knock(self) -> None:
        """Raises Outage if nothing listens at the master's address: Mooncake waits for 90 s."""
        host, _, port = self._master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self._limits.deadline_s).close()
        except OSError as error:
            raise Outage(f"no Mooncake master at {self._master}: {error}") from error

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        return self._exist([label.key for label in labels])

    def _exist(self, keys: Sequence[Key]) -> list[bool]:
        codes = self._connected().batch_is_exist([str(key) for key in keys])
        return [code == 1 for code in _answered(codes)]

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        client = self._connected()
        codes = _answered(client.batch_get_into_multi_buffers(*_calls(records)))
        outcomes = []
        for record, code in zip(records, codes, strict=True):
            asked = record.label.record_bytes
            if code in _SIZE_DIFFERS:  # or something else is wrong
                code = client.get_size(str(record.key))
                outcomes.append(MISSING if code <= 0 or code == asked else wrong_size(code, asked))
            elif code <= 0:
                outcomes.append(MISSING)
            else:
                outcomes.append(DONE if code == asked else wrong_size(code, asked))
        return outcomes

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        _answered(self._connected().batch_put_from_multi_buffers(*_calls(records)))
        there = self._exist([record.key for record in records])
        return [DONE if found else DROPPED for found in there]

    def _drop(self, keys: Sequence[Key]) -> None:
        self._connected().batch_remove([str(key) for key in keys], True)


def _calls(records: Sequence[Record]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Keys, addresses and lengths, in the form of Mooncake's calls."""
    return (
        [str(record.key) for record in records],
        [[address(piece) for piece in record.parts.pieces] for record in records],
        [[piece.nbytes for piece in record.parts.pieces] for record in records],
    )


def _answered(codes: Sequence[int]) -> Sequence[int]:
    """The codes, unless all say that the master is gone."""
    if codes and all(code == _RPC_FAILED for code in codes):
        raise Outage("the Mooncake master does not answer")
    return codes


def _client_class() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise MissingExtra(
            f"the Mooncake tier needs its client ({error}): install it with pip install "
            f"'dsv4[mooncake]', and Debian's libibverbs1 and libnuma1"
        ) from error
    return MooncakeDistributedStore
