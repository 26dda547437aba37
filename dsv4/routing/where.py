"""Which replica has which blocks, and where. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from dsv4.errors import InvalidInput, require_count

R = TypeVar("R")  # what names a replica: anything hashable

DEVICE, HOST, STORAGE = 0, 1, 2  # the media, the cheapest first
# as events call them: vLLM's words and SGLang's. No word is the device.
MEDIA: dict[str | None, int] = {
    None: DEVICE,
    "GPU": DEVICE,
    "CPU": HOST,
    "CPU_PINNED": HOST,
    "STORAGE": STORAGE,
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
_CHEAPEST = (0, DEVICE, HOST, DEVICE, STORAGE, DEVICE, HOST, DEVICE)  # of a set of media, as bits

Blocks = tuple[int, int, int]  # how many lie on the device, in host memory, in storage
NO_BLOCKS: Blocks = (0, 0, 0)


class Where(Generic[R]):
    """From the names of blocks to the replicas that have them, as events have said it.

    At most `most_blocks` names are kept. With more, the names go first that were not stored or
    asked for the longest: what is forgotten is not found here, and still served by its replica.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most = require_count("most_blocks", most_blocks)
        self._numbers: dict[R, int] = {}
        self._replicas: list[R | None] = []
        self._vacant: list[int] = []  # numbers of replicas that left
        self._counts: list[int] = []
        # of each name, which replica has it in which media (8 * number + bits): one, or several
        self._having: OrderedDict[int, int | dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._having)

    def __contains__(self, replica: object) -> bool:
        return replica in self._numbers

    def blocks(self, replica: R) -> int:
        """How many names of a replica are known here."""
        return self._counts[self._number(replica)]

    def _number(self, replica: R) -> int:
        number = self._numbers.get(replica)
        if number is None:
            raise InvalidInput(f"replica {replica!r} is not one of this router: add it first")
        return number

    # ---- replicas ----------------------------------------------------------------------------

    def add(self, replica: R) -> None:
        """A replica that has nothing, or one that starts anew."""
        if replica in self._numbers:
            self.clear(replica)
            return
        if self._vacant:
            number = self._vacant.pop()
            self._replicas[number] = replica
        else:
            number = len(self._replicas)
            self._replicas.append(replica)
            self._counts.append(0)
        self._numbers[replica] = number

    def remove(self, replica: R) -> None:
        """The replica is gone, with all that it had."""
        number = self._number(replica)
        self.clear(replica)
        del self._numbers[replica]
        self._replicas[number] = None
        self._vacant.append(number)

    # ---- events ------------------------------------------------------------------------------

    def store(self, replica: R, names: Iterable[int], medium: str | None = None) -> None:
        number, bit, having = self._number(replica), 1 << _medium(medium), self._having
        for name in names:
            found = having.get(name)
            if found is None:
                having[name] = 8 * number + bit
                self._counts[number] += 1
            elif isinstance(found, dict):
                self._counts[number] += number not in found
                found[number] = found.get(number, 0) | bit
            elif found >> 3 == number:
                having[name] = found | bit
            else:
                having[name] = {found >> 3: found & 7, number: bit}
                self._counts[number] += 1
        while len(having) > self._most:
            _, found = having.popitem(last=False)
            for each in found if isinstance(found, dict) else (found >> 3,):
                self._counts[each] -= 1

    def drop(self, replica: R, names: Iterable[int], medium: str | None = None) -> None:
        number, bit = self._number(replica), 1 << _medium(medium)
        for name in names:
            self._take(name, number, bit)

    def clear(self, replica: R) -> None:
        """The replica has nothing any more."""
        number = self._number(replica)
        if self._counts[number]:
            for name in [*self._having]:
                self._take(name, number, 7)

    def _take(self, name: int, number: int, bits: int) -> None:
        found = self._having.get(name)
        if isinstance(found, dict):
            left = found.get(number, 0) & ~bits
            if left:
                found[number] = left
            elif found.pop(number, 0):
                self._counts[number] -= 1
                if len(found) == 1:
                    ((other, media),) = found.items()
                    self._having[name] = 8 * other + media
        elif found is not None and found >> 3 == number:
            left = found & 7 & ~bits
            if left:
                self._having[name] = 8 * number + left
            else:
                del self._having[name]
                self._counts[number] -= 1

    # ---- asking ------------------------------------------------------------------------------

    def find(self, names: Sequence[int]) -> dict[R, Blocks]:
        """The replicas that have the first blocks of a prompt, and in which medium how many of them
        are; a block counts where it is cheapest to read. Blocks that were found become the last to
        be forgotten."""
        having, known, alive = self._having, 0, dict[int, list[int]]()
        counts: dict[int, list[int]] = {}
        for name in names:
            found = having.get(name)
            if found is None:
                break
            if not isinstance(found, dict):
                found = {found >> 3: found & 7}
            if not known:
                counts = {number: [0, 0, 0] for number in found}
                alive = dict(counts)
            elif len(found) < len(alive) or any(number not in found for number in alive):
                alive = {number: alive[number] for number in alive if number in found}
            if not alive:
                break
            for number, count in alive.items():
                count[_CHEAPEST[found[number]]] += 1
            known += 1
        for nth in range(known - 1, -1, -1):  # a block is forgotten before those it comes after
            having.move_to_end(names[nth])
        result: dict[R, Blocks] = {}
        for number, (device, host, storage) in counts.items():
            replica = self._replicas[number]
            assert replica is not None
            result[replica] = device, host, storage
        return result


def _medium(word: str | None) -> int:
    medium = MEDIA.get(word)
    if medium is None:
        raise InvalidInput(
            f"medium {word!r}: must be one of {', '.join(repr(each) for each in MEDIA)}"
        )
    return medium
