"""What it costs to compute cached things again, in units of one token at position 0. Torch-free.

A token runs through all weights, whatever its position, and its attention reads more the later it
comes: HCA layers read every entry before it, indexers score every key. CSA and window layers read a
fixed number of rows once that many are there. A snapshot saves a replay, whose length is bounded
(`replay_start`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.cache.prefix.resume import replay_start
from dsv4.cache.schema import CacheSchema
from dsv4.model import AttentionType, ModelSpec

# multiplications of a transformer's weights per token, layer and squared width: 4 for projections
# of attention, 8 for a feed-forward part. Experts that run are about that.
WEIGHTS_PER_LAYER = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """`per_token`: by how much the cost of a token grows with each position. `replay_tokens`: what
    a hit without a snapshot runs again, at most."""

    block_tokens: int
    per_token: float
    replay_tokens: int

    @classmethod
    def of(cls, schema: CacheSchema) -> Costs:
        far = schema.max_context
        return cls(
            block_tokens=schema.block_tokens,
            per_token=read_per_position(schema.model) / weights_per_token(schema.model),
            replay_tokens=far - replay_start(schema, far),
        )

    def token(self, depth: int) -> float:
        """Of a token of block number `depth` of its prompt."""
        return 1.0 + self.per_token * self.block_tokens * depth

    def snapshot(self, depth: int) -> float:
        """What the state at the end of block `depth` saves: the tokens of a replay."""
        tokens = (depth + 1) * self.block_tokens
        return min(tokens, self.replay_tokens) * self.token(depth)


def weights_per_token(model: ModelSpec) -> float:
    """Multiplications with weights that a token costs at any position."""
    return float(WEIGHTS_PER_LAYER * model.hidden**2 * sum(not s.draft for s in model.layers))


def read_per_position(model: ModelSpec) -> float:
    """By how many multiplications a token's attention grows with each position before it."""
    grown = 0.0
    for spec in model.layers:
        if spec.draft or not spec.ratio:
            continue
        if spec.attention is AttentionType.HCA:
            grown += 2 * model.heads * model.head_dim / spec.ratio  # scores and values
        elif spec.has_indexer:
            grown += model.index_heads * model.index_dim / spec.ratio
    return grown
