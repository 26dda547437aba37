"""How long steps and copies take: a small model of costs. Torch-free.

A step takes what the cache's operations take: a table over the number of requests that decode, a
slope over their tokens of context, and for chunks a start, a cost for each token, and one that
grows with its position. The points are those of benchmarks/results/h200.jsonl (one NVIDIA H200),
which has no weights in it: give the rates of your engine for times that include them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4.errors import InvalidInput, is_number

# What benchmarks/results/h200.jsonl says, in microseconds; tests/simulate/test_speeds.py compares.
# By model: decode steps at 8k and the largest at 1M, then chunks (tokens, from): µs
DECODES: dict[str, dict[str, float]] = {
    "v4-flash": {
        "step v4-flash at 8k batch 1": 604.0,
        "step v4-flash at 8k batch 16": 1058.3,
        "step v4-flash at 8k batch 64": 1568.8,
        "step v4-flash at 8k batch 256": 3533.6,
        "step v4-flash at 1M batch 256": 71520.9,
    },
    "v4-pro": {
        "step v4-pro at 8k batch 1": 962.1,
        "step v4-pro at 8k batch 16": 2025.1,
        "step v4-pro at 8k batch 64": 3159.9,
        "step v4-pro at 8k batch 256": 10861.7,
        "step v4-pro at 1M batch 256": 130993.1,
    },
}
CHUNKS: dict[str, dict[str, float]] = {
    "v4-flash": {
        "chunk v4-flash 512 from 0": 5394.9,
        "chunk v4-flash 8192 from 0": 54177.4,
        "chunk v4-flash 8192 from 120k": 201008.3,
    },
    "v4-pro": {
        "chunk v4-pro 8192 from 0": 191095.1,
        "chunk v4-pro 8192 from 120k": 456717.6,
    },
}
# what a prompt of 128k tokens (461,111,296 bytes) takes to come back, in microseconds
BACK_BYTES = 461_111_296
BACK = {
    "tiers: 128k tokens back from host": 147071.2,
    "tiers: 128k tokens back from disk": 356709.5,
}
# a plain copy of blocks between host memory and the device
LINK_BYTES, LINK = 115_277_824, {"tiers: 256 blocks up, host memory": 2248.1}

BATCHES = (1, 16, 64, 256)
SHORT, LONG = 8192, 1 << 20  # contexts of the decode steps
CHUNK, DEEP = 8192, 120 * 1024  # tokens of a chunk, and where the deep one begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """`decode_s` are the seconds of decode steps of `batches` requests at 8k tokens each;
    `context_s` is added for each token of context above. A chunk takes `chunk_s`, and for each
    token `token_s` and its position times `position_s`.

    `prefill_rate`, tokens per second, takes the place of the model of chunks, and `decode_rate`,
    steps per second, of that of decode steps. The others are bytes per second: `host_rate` and
    `disk_rate` of a prompt that comes back from a tier, `link_rate` of entries that a step fetches
    from host memory.
    """

    batches: tuple[int, ...] = BATCHES
    decode_s: tuple[float, ...] = ()
    context_s: float = 0.0
    chunk_s: float = 0.0
    token_s: float = 0.0
    position_s: float = 0.0
    prefill_rate: float | None = None
    decode_rate: float | None = None
    host_rate: float
    disk_rate: float
    link_rate: float

    @classmethod
    def of(
        cls,
        model: str,
        *,
        prefill_rate: float | None = None,
        decode_rate: float | None = None,
        host_rate: float | None = None,
        disk_rate: float | None = None,
        link_rate: float | None = None,
    ) -> Speeds:
        """Speeds that were measured of a model, or that are given. Raises InvalidInput for a model
        that was not measured unless both rates are given."""
        host_us, disk_us = BACK.values()
        (link_us,) = LINK.values()
        given = {
            "prefill_rate": prefill_rate,
            "decode_rate": decode_rate,
            "host_rate": host_rate,
            "disk_rate": disk_rate,
            "link_rate": link_rate,
        }
        for name, rate in given.items():
            if rate is not None and (not is_number(rate) or not 0 < rate < float("inf")):
                raise InvalidInput(f"{name}={rate!r}: must be a number above 0")
        plain = cls(
            prefill_rate=prefill_rate,
            decode_rate=decode_rate,
            host_rate=host_rate or BACK_BYTES / host_us * 1e6,
            disk_rate=disk_rate or BACK_BYTES / disk_us * 1e6,
            link_rate=link_rate or LINK_BYTES / link_us * 1e6,
        )
        if model not in DECODES:
            if prefill_rate is None or decode_rate is None:
                raise InvalidInput(
                    f"{model} was not measured ({', '.join(DECODES)} were): give its prefill rate "
                    f"and its decode rate"
                )
            return plain
        *short, deep = DECODES[model].values()
        points = [*CHUNKS[model].values()]
        position = (points[-1] - points[-2]) / (CHUNK * DEEP)
        chunk = 0.0
        if len(points) > 2:  # from a shorter chunk: what does not grow with its length
            few = 512
            own = [us - position * n * n / 2 for us, n in zip(points, (few, CHUNK), strict=False)]
            chunk = max(0.0, own[0] - (own[1] - own[0]) / (CHUNK - few) * few)
        token = (points[-2] - chunk - position * CHUNK * CHUNK / 2) / CHUNK
        return replace(
            plain,
            decode_s=tuple(us / 1e6 for us in short),
            context_s=(deep - short[-1]) / (BATCHES[-1] * (LONG - SHORT)) / 1e6,
            chunk_s=chunk / 1e6,
            token_s=token / 1e6,
            position_s=position / 1e6,
        )

    @property
    def has_weights(self) -> bool:
        """Whether all times are those of an engine, not of the cache's operations alone."""
        return self.prefill_rate is not None and self.decode_rate is not None

    def step_s(self, decodes: int, context: int, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """A step of `decodes` requests with one token each, which have `context` tokens in all, and
        of `chunks`: tokens, and the position of the first."""
        seconds = 0.0
        if decodes:
            seconds = self._decodes_s(decodes, context)
        for tokens, start in chunks:
            if self.prefill_rate is not None:
                seconds += tokens / self.prefill_rate
            else:
                positions = tokens * (start + tokens / 2)
                seconds += self.chunk_s + self.token_s * tokens + self.position_s * positions
        return seconds

    def _decodes_s(self, decodes: int, context: int) -> float:
        if self.decode_rate is not None:
            return 1 / self.decode_rate
        at = min(max(bisect_right(self.batches, decodes), 1), len(self.batches) - 1)
        low, high = self.batches[at - 1], self.batches[at]
        low_s, high_s = self.decode_s[at - 1], self.decode_s[at]
        seconds = low_s + (high_s - low_s) * (decodes - low) / (high - low)
        # shorter contexts than those measured are counted as these
        return seconds + self.context_s * max(0, context - decodes * SHORT)
