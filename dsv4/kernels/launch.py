"""One launch of one kernel, before it happens: what launchers return and tests compile.

Triton finds the binary of a launch by the text of all its constants, which takes the host longer
than most of our kernels take the GPU. `Launch.run` asks it once for each kind of launch and then
starts the binary itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsv4.kernels.numerics import INTERPRETED
from dsv4.kernels.target import BACKEND, known_options

_INT32_MAX = 2**31 - 1
# what Triton compiled for a kind of launch, and its constants in the order of the arguments
_prepared: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


class Launch(NamedTuple):
    """`grid` programs of `kernel`. `constants` are its compile-time arguments by name, `options`
    the compiler's: warps, stages, a bound on registers."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """Launches on the current stream; a grid without programs launches nothing."""
        if not all(self.grid):
            return
        if INTERPRETED.value:
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)
            return
        key = self.kind()
        found = _prepared.get(key)
        if found is None:
            options = known_options(BACKEND, self.options)
            binary = self.kernel[self.grid](*self.arguments, **self.constants, **options)
            names = self.kernel.arg_names[len(self.arguments) :]
            _prepared[key] = binary, tuple(self.constants[name] for name in names)
            return
        binary, constants = found
        grid = (*self.grid, 1, 1)[:3]
        binary[grid](*self.arguments, *constants)

    def kind(self) -> tuple[Any, ...]:
        """Launches of one kind run the same binary: besides the device, the kernel and what it was
        compiled for, Triton tells arguments apart by type, by alignment, and whether one is 1."""
        return (
            torch.cuda.current_device(),
            id(self.kernel),
            tuple(self.constants.values()),
            tuple(self.options.values()),
            *map(_specialization, self.arguments),
        )


def _specialization(argument: Any) -> Any:
    if type(argument) is int:
        if argument == 1:
            return 1
        return 2 + (argument % 16 == 0) + 2 * (argument < -_INT32_MAX or argument > _INT32_MAX)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument)
