"""GPUs that one plans with and need not have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv4.errors import InvalidInput
from dsv4.units import parse_bytes

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. `memory_bytes` is what its data sheet says; `hopper_processors` how many processors it
    has if it is a Hopper, whose kernels need workspace for each (None: another GPU)."""

    name: str
    memory_bytes: int
    hopper_processors: int | None = None


# memory as the data sheets give it, in 10^9 bytes; SXM or OAM modules where there are several
GPUS: dict[str, Gpu] = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu(name="A100", memory_bytes=80 * GB),
        Gpu(name="A100-40GB", memory_bytes=40 * GB),
        Gpu(name="L40S", memory_bytes=48 * GB),
        Gpu(name="RTX-4090", memory_bytes=24 * GB),
        Gpu(name="RTX-5090", memory_bytes=32 * GB),
        Gpu(name="RTX-PRO-6000", memory_bytes=96 * GB),
        Gpu(name="H20", memory_bytes=96 * GB, hopper_processors=78),
        Gpu(name="H100", memory_bytes=80 * GB, hopper_processors=132),
        Gpu(name="H100-NVL", memory_bytes=94 * GB, hopper_processors=132),
        Gpu(name="H200", memory_bytes=141 * GB, hopper_processors=132),
        Gpu(name="B200", memory_bytes=180 * GB),
        Gpu(name="MI300X", memory_bytes=192 * GB),
        Gpu(name="MI325X", memory_bytes=256 * GB),
        Gpu(name="MI355X", memory_bytes=288 * GB),
    )
}
_MOST_GPUS = 4096
_LEAST_MEMORY = 10**9
# a GPU that is only known by its memory gets the workspace of the one that needs most
_LARGEST_WORKSPACE = 132
_COUNTED = re.compile(r"\s*(?:([0-9]+)\s*[x\u00d7*]\s*)?(\S.*?)\s*", re.IGNORECASE)
_BEFORE = re.compile(r"(?P<count>[0-9]+)\s*(?P<name>[a-z].*)", re.IGNORECASE)
_AFTER = re.compile(r"(?P<name>.*\S)\s*[x\u00d7*]\s*(?P<count>[0-9]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`count` equal GPUs. `unit` is a size as it was written, whose unit answers are given in."""

    count: int
    gpu: Gpu
    unit: str = "GB"

    @property
    def text(self) -> str:
        return f"{self.count} x {self.gpu.name}"


def parse_gpus(text: str) -> Gpus:
    """Reads "4x80GB", "8xH200", "8H200", "H200x8", "H200", "2 x 141 GB" or "80GB". Raises
    InvalidInput."""
    match = _COUNTED.fullmatch(text) if isinstance(text, str) and len(text) <= 64 else None
    if match is None:
        raise _refused(text)
    count, what = _checked(int(match[1] or 1), text), match[2]
    named = _NAMED.get(_letters(what))
    if named is None and match[1] is None:  # "8H100", "H100x8"
        for pattern in (_BEFORE, _AFTER):
            glued = pattern.fullmatch(text.strip())
            found = _NAMED.get(_letters(glued["name"])) if glued is not None else None
            if glued is not None and found is not None:
                count, named = int(glued["count"]), found
    if named is not None:
        return Gpus(count=_checked(count, text), gpu=named)
    try:
        memory_bytes = parse_bytes(what)
    except InvalidInput:
        raise _refused(text) from None
    if memory_bytes < _LEAST_MEMORY:  # "80" would be bytes
        hint = f": did you mean {match[1] + 'x' if match[1] else ''}{what}GB? Otherwise"
        raise _refused(text, hint if what.isdecimal() else ":")
    gpu = Gpu(name=what, memory_bytes=memory_bytes, hopper_processors=_LARGEST_WORKSPACE)
    return Gpus(count=count, gpu=gpu, unit=what)


def is_counted(text: str) -> bool:
    """Whether a size of memory is written as that of several GPUs: "4x80GB"."""
    return bool(re.fullmatch(r"\s*[0-9]+\s*[x\u00d7*].*", text))


def _letters(name: str) -> str:
    """A name without case and separators."""
    return re.sub(r"[\s_-]+", "", name.lower())


def _checked(count: int, text: str) -> int:
    if not 1 <= count <= _MOST_GPUS:
        raise InvalidInput(f"{text!r} are {count:,} GPUs: give 1 to {_MOST_GPUS:,}")
    return count


_NAMED = {_letters(name): gpu for name, gpu in GPUS.items()}


def _refused(text: object, hint: str = ":") -> InvalidInput:
    names = ", ".join(gpu.name for gpu in GPUS.values())
    return InvalidInput(
        f"{text!r} names neither a GPU nor its memory{hint} write 4x80GB, 8xH200 or one of {names}"
    )
