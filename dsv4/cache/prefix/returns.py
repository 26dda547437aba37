"""How likely it is that a cached prompt comes back, learned from those that did. Torch-free.

The clock counts blocks: one that is cached, or used, is one tick. Each turn of a conversation ends
with a block, whose life ends when a prompt goes on from there (a return), or when it has been gone
for long (a loss). From both, by kind and age:

    density(kind, age) = returns at this age or later / ticks lived from this age on

That is what a block of memory earns per tick from now on (a least hit density: Beckmann and others,
NSDI 2018). What was evicted is remembered for some time, so that a return of it is noticed too.
"""

from __future__ import annotations

from collections.abc import Hashable

KINDS = 6  # by turns (first, second, later) and by length (short, long)
LONG_TOKENS = 4096  # from here on a prompt is long
BINS = 160  # four for each doubling of the age
ENOUGH = 256  # lives between two looks at what was learned; the first looks come sooner
KEPT = 0.9  # of what was learned, at each look
# what is assumed before anything was seen, as so many lives of each kind. A short first prompt
# (a title, a summary) seldom comes back; each turn that came makes another one likelier.
ASSUMED_LIVES = 2.0
ASSUMED_RETURNS = (1 / 16, 1.0, 1.0, 2.0, 2.0, 4.0)
YOUNG = 64  # ticks: at younger ages nothing is known


def kind_of(turns: int, tokens: int) -> int:
    return 2 * min(turns, 2) + (tokens >= LONG_TOKENS)


def bin_of(age: int) -> int:
    shift = max(0, age.bit_length() - 3)
    return min(BINS - 1, 4 * shift + (age >> shift))


def start_of(nth: int) -> int:
    """The youngest age of a bin."""
    shift = max(0, nth // 4 - 1)
    return (nth - 4 * shift) << shift


class Returns:
    """What was learned, and the densities from it. `remembered` bounds the evicted turn ends that
    are kept in mind; a call takes constant time, apart from looks."""

    def __init__(self) -> None:
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        self._gone: dict[Hashable, tuple[int, int, int, int]] = {}  # kind, use, turns, bin
        self._lives = 0
        self._density: list[list[float]] = []
        self._look()

    def density(self, kind: int, age: int) -> float:
        return self._density[kind][bin_of(age)]

    def returned(self, kind: int, age: int) -> None:
        """A prompt goes on from a turn end of this age."""
        self._returned[kind][bin_of(age)] += 1
        self._note()

    def evicted(self, name: Hashable, kind: int, turns: int, last_use: int, now: int) -> None:
        """A turn end was evicted: it counts as lost, unless it comes back."""
        lost = bin_of(now - last_use)
        self._lost[kind][lost] += 1
        self._gone[name] = kind, last_use, turns, lost
        self._note()

    def back(self, name: Hashable, now: int) -> int | None:
        """How many turns an evicted turn end had, which is cached again; None if it is not
        remembered."""
        found = self._gone.pop(name, None)
        if found is None:
            return None
        kind, last_use, turns, lost = found
        self._lost[kind][lost] = max(0.0, self._lost[kind][lost] - 1)
        self.returned(kind, now - last_use)
        return turns

    def forget(self, remembered: int, now: int) -> None:
        """Remembers no more than so many evicted turn ends. The others are lost at their age
        now."""
        while len(self._gone) > remembered:
            kind, last_use, _, lost = self._gone.pop(next(iter(self._gone)))
            moved = min(1.0, self._lost[kind][lost])
            self._lost[kind][lost] -= moved
            self._lost[kind][bin_of(now - last_use)] += moved

    def _note(self) -> None:
        self._lives += 1
        if self._lives % ENOUGH == 0:
            self._look()
            for counts in (*self._returned, *self._lost):
                counts[:] = [KEPT * count for count in counts]
        elif self._lives < ENOUGH and self._lives >= 16 and not self._lives & self._lives - 1:
            self._look()

    def _look(self) -> None:
        self._density = [self._densities(kind) for kind in range(KINDS)]

    def _densities(self, kind: int) -> list[float]:
        returned, lost, assumed = self._returned[kind], self._lost[kind], ASSUMED_RETURNS[kind]
        densities = [0.0] * BINS
        returns = lives = ticks = 0.0
        for nth in range(BINS - 1, -1, -1):
            returns += returned[nth]
            lives += returned[nth] + lost[nth]
            ticks += lives * (start_of(nth + 1) - start_of(nth))
            young = ASSUMED_LIVES * (YOUNG + start_of(nth))
            densities[nth] = (returns + ASSUMED_LIVES * assumed) / (ticks + young)
        return densities
