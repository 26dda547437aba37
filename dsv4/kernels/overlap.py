"""How every kernel begins. Consecutive launches overlap where a GPU allows it
(`Target.launches_early`): the second begins once all programs of the first have started and let it
in, and its first statement waits until the first has ended."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.target import launches_early


@triton.jit
def begin_program():
    """Waits until the previous launch has ended and its writes can be read; until then a kernel
    touches no memory. Then lets programs of the next launch take free places. Doing so before the
    wait would let in all launches of the queue, one after the other, which would only wait
    there."""
    if launches_early():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
