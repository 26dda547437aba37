"""A line of the log for each request that has ended: what `dsv4 simulate` needs to replay the load.

Lengths, the time it came, and names of its blocks, prompt and answer, which say only where requests
begin alike: they are made with a key of this process, so none of the text can be found with them.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time

from dsv4.engine import Job
from dsv4.serve.generation import Generation
from dsv4.serve.runner import Runner

TURNS = logging.getLogger("dsv4.serve.turns")
FIELDS = (
    "timestamp",
    "input_length",
    "output_length",
    "cached_tokens",
    "block_tokens",
    "hash_ids",
    "session",
)
NAME_BYTES = 7  # a name is a whole number that every JSON reader keeps


class Turns:
    """Listens to a runner; does nothing unless the log is wanted."""

    def __init__(self, runner: Runner) -> None:
        self._manager = runner.manager
        self._key = secrets.token_bytes(16)
        runner.after_turn.append(self._note)

    def _note(self, job: Job) -> None:
        """In the thread that steps."""
        if not TURNS.isEnabledFor(logging.INFO):
            return
        data: Generation = job.data
        came = time.time() - (time.monotonic() - data.arrived_s)
        # the newest token has not run: no block that it completes is cached
        trail = self._manager.prefix.prompt(job.tokens[:-1] or job.tokens, job.salt).trail
        session = data.terms.session
        found = {
            "timestamp": round(1000 * came),
            "input_length": job.prompt_tokens,
            "output_length": len(job.generated),
            "cached_tokens": job.tokens_skipped,
            "block_tokens": self._manager.schema.block_tokens,
            "hash_ids": [] if trail is None else [self._name(digest) for digest in trail.chain],
            "session": format(self._name(session.encode()), "x") if session else None,
        }
        TURNS.info(
            "%d tokens, %d of them cached, and %d answered",
            job.prompt_tokens,
            job.tokens_skipped,
            len(job.generated),
            extra=found,
        )

    def _name(self, of: bytes) -> int:
        found = hashlib.blake2b(of, digest_size=NAME_BYTES, key=self._key).digest()
        return int.from_bytes(found, "big") >> 3  # below 2^53
