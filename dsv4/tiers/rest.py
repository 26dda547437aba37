"""Background threads let the threads run that call a tier. Torch-free.

Python changes from one thread to another when that one waits, or after 5 ms (which is the process's
to set). Short calls of the system do not count as waiting: the thread is back before another one
has noticed. So a thread that works through many records rests now and then.
"""

from __future__ import annotations

import threading
import time

BUSY_S = 0.0004  # how long a background thread works before it rests
REST_S = 0.00005  # long enough that a waiting thread runs

_began = threading.local()


def rest() -> None:
    """Between two small pieces of work, of a record each: waits for a moment if this thread has
    worked for a while."""
    now = time.perf_counter()
    if now - getattr(_began, "at", 0.0) > BUSY_S:
        time.sleep(REST_S)
        _began.at = time.perf_counter()
