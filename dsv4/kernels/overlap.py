"""How every kernel begins. Launches that follow each other overlap where a GPU lets them
(`Target.launches_early`): the second begins once all programs of the first have begun and let it
in, and waits in its first statement until the first has ended."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.target import launches_early


@triton.jit
def begin_program():
    """Waits until the launch before has ended and what it wrote can be read; until then a kernel
    touches no memory. Then lets programs of the next launch take places that are free: before the
    wait it would let them all in, one launch after the other, to sit there and wait."""
    if launches_early():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
