"""Records whose payload is encrypted where it leaves the process. In host memory they are as they
are without. Torch-free. Needs the extra `encrypt`."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4.tiers.record import (
    Parts,
    Reason,
    Record,
    Refusal,
    box_of,
    check,
    label_refusal,
    mac_refusal,
    pack_header,
    payload_refusal,
    payload_sum,
    read_header,
    seal,
)
from dsv4.tiers.secret import Secret


def encrypted(record: Record) -> Record:
    """A record as it is kept outside, in memory of its own."""
    label, pieces = record.label, record.parts.payload
    assert label.secret is not None
    payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    sealed, box = label.secret.encrypt(label.digest, payload)
    parts = Parts.alone(label)
    parts.payload[0][:] = sealed
    parts.header[:] = pack_header(label, payload_sum(parts.payload), box=box)
    return Record(label=label, parts=parts, sealed=True)


def opened(record: Record) -> Refusal | None:
    """`check`, for what was loaded. An encrypted record is decrypted in place, and sealed as it is
    in host memory. After a refusal the payload is undefined."""
    parts, secret = record.parts, record.label.secret
    found = read_header(parts.header)
    box = b"" if isinstance(found, Refusal) else box_of(parts.header)
    if isinstance(found, Refusal) or not box or secret is None:
        return check(record)
    label, total = found
    refusal = (
        mac_refusal(parts.header, (), secret)
        or label_refusal(label, record.label)
        or payload_refusal(payload_sum(parts.payload), total)
    )
    if refusal is not None:
        return refusal
    try:
        pieces = list(secret.decrypt(label.digest, parts.payload, box))
    except ValueError:
        return _CHANGED
    for piece, plain in zip(parts.payload, pieces, strict=True):
        piece[:] = plain
    seal(record)
    return None


def file_refusal(
    header: bytes, digest: bytes, payload: Iterable[bytes], secret: Secret
) -> Refusal | None:
    """Why the record in a file is refused with this key; its label and sums are right."""
    box = box_of(header)
    if not box:
        return mac_refusal(header, payload, secret)
    refusal = mac_refusal(header, (), secret)
    if refusal is not None:
        return refusal
    try:
        for _ in secret.decrypt(digest, payload, box):
            pass
    except ValueError:
        return _CHANGED
    return None


_CHANGED = Refusal(reason=Reason.MAC, found="another tag", asked="that of this key")
