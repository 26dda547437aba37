"""One launch of one kernel, before it happens: what launchers return and tests compile."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.kernels.target import BACKEND, known_options


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
        if all(self.grid):
            options = known_options(BACKEND, self.options)
            self.kernel[self.grid](*self.arguments, **self.constants, **options)
