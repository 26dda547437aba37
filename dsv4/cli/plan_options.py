"""Which options of `dsv4 plan` need another one, and what says so."""

from __future__ import annotations

from collections.abc import Collection

import typer

from dsv4.errors import InvalidInput

# option: it means something only with one of these
PARTNERS: dict[str, tuple[str, ...]] = {
    "snapshots": ("step_tokens", "gpus"),
    "open_plans": ("step_tokens", "host_memory"),
    "batch_invariant": ("step_tokens",),
    "device": ("step_tokens",),
    "snapshot_every": ("tier",),
    "answer": ("link",),
    "prefill_rate": ("link",),
    "decode_rate": ("link",),
    "host_memory": ("memory", "gpus"),
    "hot_rows": ("host_memory",),
    "link_host": ("host_memory",),
    "tp": ("gpus",),
    "pp": ("gpus",),
    "weights": ("gpus",),
    "activations": ("gpus",),
}
# what is asked about one GPU's part, or about something else than GPUs
NOT_WITH_GPUS = (
    "memory",
    "open_plans",
    "batch_invariant",
    "device",
    "link",
    "hot_rows",
    "link_host",
    "snapshot_every",
    "plot",
)


def given(context: typer.Context) -> set[str]:
    """The options that stand on the command line."""
    return {
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def check_partners(names: Collection[str]) -> None:
    """Raises InvalidInput where an option stands without the one that it belongs to."""
    for name, partners in PARTNERS.items():
        if name in names and not any(partner in names for partner in partners):
            needed = " or ".join(map(_option, partners))
            raise InvalidInput(f"{_option(name)} has no meaning without {needed}: give that too")
    if "gpus" in names:
        if "requests" in names and "context" not in names:
            raise InvalidInput("--requests with --gpus are of one length: give --context too")
        for name in NOT_WITH_GPUS:
            if name in names:
                raise InvalidInput(
                    f"{_option(name)} is about one cache, --gpus about a whole model on all of "
                    f"them: give one of the two"
                )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
