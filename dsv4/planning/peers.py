"""What other caches keep of DeepSeek-V4-Flash, as it was measured: the planner's columns next
to ours. `benchmarks/peers.py` has the other figures of other libraries."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.model import PRESETS, ModelSpec

SOURCE = (
    "measured by the authors of dsv4 on an H200 on 2026-11-15, versions not written down: "
    "vLLM 3,915 bytes a token and 26.1 MB a request; SGLang 7,033 to 7,705 bytes a token, in which "
    "its pool of windows is, and 10 MiB a request"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCache:
    """Bytes a token of context, at least and at most, and bytes a request at any length."""

    name: str
    token_bytes: tuple[int, int]
    request_bytes: int

    def requests(self, memory_bytes: int, context_tokens: int) -> tuple[int, int]:
        """How many requests of that context fit, at least and at most, if nothing else were in that
        memory: their workspace was not measured."""
        most, least = (
            max(0, memory_bytes) // (context_tokens * each + self.request_bytes)
            for each in self.token_bytes
        )
        return least, most


PEERS = (
    PeerCache(name="vLLM", token_bytes=(3915, 3915), request_bytes=26_100_000),
    PeerCache(name="SGLang", token_bytes=(7033, 7705), request_bytes=10 << 20),
)


def peers_of(model: ModelSpec) -> tuple[PeerCache, ...]:
    """Those that were measured with a model of these layers: V4-Flash's."""
    flash = PRESETS["v4-flash"]
    backbone = tuple(spec for spec in model.layers if not spec.draft)
    same = (model.head_dim, model.rope_dim, model.index_dim, model.window) == (
        flash.head_dim,
        flash.rope_dim,
        flash.index_dim,
        flash.window,
    )
    known = tuple(spec for spec in flash.layers if not spec.draft)
    return PEERS if same and backbone == known else ()
