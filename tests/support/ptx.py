"""PTX executed on a CPU: code without branches, all threads of a program in step. For kernels that
Triton's interpreter cannot run. Knows the instructions that such kernels have had so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

SHARED_BYTES = 256 << 10
# an address is that of a buffer's byte: the number of the parameter above so many bits
_BUFFER_BITS = 32
_SKIPPED = ("bar.", "mbarrier.", "fence.", "cp.async.commit_group", "cp.async.wait_group")
_NO_CODE = (".loc", ".reg", ".pragma", "$L", "{", "}", "waitLoop", "@!complete")


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    out = np.zeros_like(a)
    for byte in range(4):
        chosen = selector >> np.uint64(4 * byte) & _mask(4)
        assert (chosen < 8).all(), "a byte's sign is asked for"
        source = np.where(chosen < 4, a, b)
        out |= (source >> (chosen % np.uint64(4) * np.uint64(8)) & _mask(8)) << np.uint64(8 * byte)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert (table == 0xEA).all()
    return (a & b) | c


def _half(x: Words, shift: int) -> NDArray[np.float64]:
    """The bf16 numbers in 16 bits of words."""
    bits = (x >> np.uint64(shift) & _mask(16)).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def _equal_halves(a: Words, b: Words) -> Words:
    """set.eq.u32.bf16x2: all ones where two numbers are equal."""
    return sum(
        np.where(_half(a, shift) == _half(b, shift), _mask(16) << np.uint64(shift), np.uint64(0))
        for shift in (0, 16)
    )


def _bf16x2_products(a: Words, b: Words) -> Words:
    """mul.rn.bf16x2. Products must be exact, so that no way to round them is in question."""

    out = np.zeros_like(a)
    for shift in (0, 16):
        exact = _half(a, shift) * _half(b, shift)
        found = torch.from_numpy(exact.astype(np.float32)).to(torch.bfloat16)
        rounded = ~np.equal(found.double().numpy(), exact) & ~np.isnan(exact)
        assert not rounded.any(), "a product was rounded"
        bits = found.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
        out |= bits << np.uint64(shift)
    return out


def _true(condition: NDArray[np.bool_]) -> Words:
    return condition.astype(np.uint64)


_32 = _mask(32)
OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.s32": lambda a, b: (a + b) & _32,
    "add.s64": lambda a, b: a + b,
    "mul.lo.s32": lambda a, b: a * b & _32,
    "mad.wide.u32": lambda a, b, c: (a & _32) * (b & _32) + c,
    "and.b16": np.bitwise_and,
    "and.b32": np.bitwise_and,
    "and.pred": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": lambda a, b: a << b & _32,
    "shr.b32": lambda a, b: (a & _32) >> b,
    "shr.u32": lambda a, b: (a & _32) >> b,
    "shr.u16": lambda a, b: (a & _mask(16)) >> b,
    "cvt.u16.u32": lambda a: a & _mask(16),
    "cvt.u32.u16": lambda a: a & _mask(16),
    "cvt.u64.u32": lambda a: a & _32,
    "setp.eq.b16": lambda a, b: _true(a == b),
    "setp.eq.b32": lambda a, b: _true(a == b),
    "setp.lt.u32": lambda a, b: _true(a < b),
    "selp.b32": lambda a, b, p: np.where(p != 0, a, b),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _bf16x2_products,
    "set.eq.u32.bf16x2": _equal_halves,
}


class Program:
    """The threads of one program: `registers` by name, one number per thread, and the memory that
    its parameters point to."""

    def __init__(self, threads: int, buffers: Sequence[Bytes] = ()) -> None:
        self.threads, self.buffers = threads, buffers
        self.shared = np.full(SHARED_BYTES, 0xAB, np.uint8)
        self.registers: dict[str, Words] = {
            "%tid.x": np.arange(threads, dtype=np.uint64),
            "global_smem": np.zeros(threads, np.uint64),
        }

    def run(self, ptx: str) -> None:
        """Executes a kernel, or the body of an inline assembly whose operands are registers."""
        begin, end = ptx.find("$L__func_begin0:"), ptx.find("ret;")
        code = re.sub(r"//.*", "", ptx[max(begin, 0) : end if end >= 0 else len(ptx)])
        for line in map(str.strip, code.splitlines()):
            if line and not line.startswith(_NO_CODE):
                self._execute(line.rstrip(";"))

    def _execute(self, line: str) -> None:
        live = np.ones(self.threads, np.bool_)
        if guarded := re.match(r"@(!?)(%p\d+)\s+(.*)", line):
            live = (self.registers[guarded[2]] != 0) ^ (guarded[1] == "!")
            line = guarded[3]
        operation, _, rest = line.replace("\t", " ").partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
        if operation.startswith(_SKIPPED):
            return
        if operation == "ld.param.b64":
            number = int(operands[1].rpartition("_")[2].rstrip("]"))
            self.registers[operands[0]] = self._value(str(number << _BUFFER_BITS))
        elif operation == "elect.sync":  # one lane of each warp
            lane = np.arange(self.threads, dtype=np.uint64) % np.uint64(32)
            self.registers[operands[0].partition("|")[2]] = _true(lane == 0)
        elif operation.startswith("cp.async.cg.shared.global"):
            self._copy(*operands, live=live)
        elif operation.startswith(("ld.shared", "st.shared", "st.global")):
            self._move(operation, *operands, live=live)
        elif operation == "mov.b32" and operands[0].startswith("{"):
            whole = self._value(operands[1])
            for nth, name in enumerate(_names(operands[0])):
                self.registers[name] = whole >> np.uint64(16 * nth) & _mask(16)
        elif operation == "mov.b32" and operands[1].startswith("{"):
            low, high = map(self._value, _names(operands[1]))
            self.registers[operands[0]] = low & _mask(16) | (high & _mask(16)) << np.uint64(16)
        else:
            assert live.all()
            values = map(self._value, operands[1:])
            self.registers[operands[0]] = OPERATIONS[operation](*values)

    def _value(self, name: str) -> Words:
        if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+", name):
            return np.full(self.threads, int(name, 0) % (1 << 64), np.uint64)
        return self.registers[name]

    def _address(self, place: str) -> Words:
        base, _, offset = place.strip("[] ").partition("+")
        return self._value(base.strip()) + np.uint64(int(offset or 0))

    def _copy(
        self, target: str, source: str, size: str, read: str, *, live: NDArray[np.bool_]
    ) -> None:
        """16 bytes per thread, zeros where none are read."""
        assert int(size, 0) == 16
        to, at, counts = self._address(target), self._address(source), self._value(read)
        for thread in np.flatnonzero(live):
            first, count = int(to[thread]), int(counts[thread])
            assert first % 16 == 0
            assert count in (0, 16)
            self.shared[first : first + 16] = self._global(at[thread], 16) if count else 0

    def _move(self, operation: str, *operands: str, live: NDArray[np.bool_]) -> None:
        """Between registers and memory, one word after the other."""
        width = int(operation.rpartition("b")[2]) // 8
        loads = operation.startswith("ld")
        names, place = operands if loads else operands[::-1]
        at = self._address(place)
        for nth, name in enumerate(_names(names)):
            values = np.zeros(self.threads, np.uint64) if loads else self._value(name)
            for thread in np.flatnonzero(live):
                start = int(at[thread]) + width * nth
                if "shared" in operation:
                    memory = self.shared[start : start + width]
                else:
                    memory = self._global(start, width)
                if loads:
                    values[thread] = int.from_bytes(memory.tobytes(), "little")
                else:
                    word = int(values[thread]) % (1 << 8 * width)
                    memory[:] = np.frombuffer(word.to_bytes(width, "little"), np.uint8)
            if loads:
                self.registers[name] = values

    def _global(self, address: int | np.uint64, count: int) -> Bytes:
        number, offset = divmod(int(address), 1 << _BUFFER_BITS)
        found = self.buffers[number][offset : offset + count]
        assert len(found) == count, "outside of the buffer"
        return found


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]
