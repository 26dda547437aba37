"""Expert parallelism: which part of a layer each rank computes, and what all must agree on.

transformers' plans for V4 split the experts; those up to 5.18 the index heads too, and a plan for
tensor parallelism the embeddings and the head. Everything else is computed by all ranks alike, and
so is the cache: each rank has its own, with the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import InvalidInput, RequestError

# modules of an attention layer whose parameters transformers' plan splits, by heads
_BY_HEADS = ("compressor.indexer.q_b_proj.", "compressor.indexer.scorer.weights_proj.")
_IN_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.(.+)")
_KNOWN_PLANS = (
    "DistributedConfig(tp_size=n, ep_size=n, tp_plan={}), up to transformers 5.18 with "
    "DistributedConfig(tp_size=n, enable_expert_parallel=True)"
)
_NOT_OPENED = -1


class Ranks:
    """The processes that compute one model together. All make the same calls in the same order.
    `split_heads` are the layers whose index heads are divided between them."""

    def __init__(
        self, group: Any, count: int, device: torch.device, split_heads: frozenset[int]
    ) -> None:
        self._group, self.count, self._device = group, count, device
        self.split_heads = split_heads

    def gather_heads(self, q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [tokens, heads · width] and weights [tokens, heads] of all heads from each
        rank's own, in one collective."""
        mine = torch.cat((q, weights), dim=-1)
        parts = mine.new_empty((self.count, *mine.shape))
        # as bytes: not every backend knows every type
        _all_gather(parts.view(torch.uint8).flatten(0, 1), mine.view(torch.uint8), self._group)
        all_q, all_weights = parts.split((q.shape[1], weights.shape[1]), dim=-1)
        return all_q.transpose(0, 1).flatten(1), all_weights.transpose(0, 1).flatten(1)

    def open_alike(
        self, rows: int, open_rows: Callable[[bool], list[int]], close: Callable[[], None]
    ) -> None:
        """Opens rows on all ranks with the same tokens to run.

        `open_rows(reuse)` opens them and gives their lengths; `close()` gives them back. What is
        cached may differ between ranks, for rows come back when a garbage collection finds them:
        where lengths differ, no rank reuses anything. Raises what `open_rows` raises, or
        RequestError where it raised on another rank; then no rank has opened.
        """
        for reuse in (True, False):
            failure: Exception | None = None
            lengths = [_NOT_OPENED] * rows
            try:
                lengths = open_rows(reuse)
            except Exception as error:
                failure = error
            shortest, longest = self._extremes(lengths)
            if failure is not None:
                raise failure
            if shortest == longest:
                return
            close()
            if _NOT_OPENED in shortest:
                raise RequestError("another rank could not open the rows of this call: see there")
        raise RequestError("ranks disagree on the rows of a call: all must make the same calls")

    def _extremes(self, lengths: list[int]) -> tuple[list[int], list[int]]:
        """The least and the greatest that any rank has, row by row."""
        both = torch.tensor([*lengths, *(-length for length in lengths)], device=self._device)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self._group)
        found = both.tolist()
        return [-length for length in found[len(lengths) :]], found[: len(lengths)]


def _all_gather(parts: Tensor, mine: Tensor, group: Any) -> None:
    """all_gather_single is all_gather_into_tensor by its name since torch 2.13."""
    distributed = torch.distributed
    new = getattr(distributed, "all_gather_single", None)
    (new or distributed.all_gather_into_tensor)(parts, mine, group=group)


def read_ranks(model: Any) -> Ranks | None:
    """The ranks of a model that is split between processes; None for one that is whole in this one.

    A parameter that is split anywhere makes it split, for what all must do alike is then computed
    together. Raises InvalidInput for a layer whose attention is split another way than by index
    heads: full attention needs all of it.
    """
    if not torch.distributed.is_available():
        return None
    _check_layers(model)
    split = _split_parameters(model)
    if not split:
        return None
    first = next(iter(split.values()))
    ranks = first.device_mesh.mesh.flatten().tolist()
    heads: dict[int, set[str]] = {}
    for name, parameter in split.items():
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or mesh.mesh.tolist() != ranks:
            raise InvalidInput(
                f"{name} is split over {mesh}, but others over ranks {ranks}: the fast path knows "
                f"one group of processes that compute all together; load the model with "
                f"{_KNOWN_PLANS}"
            )
        part = _IN_ATTENTION.fullmatch(name)
        if part is None:
            continue
        layer, name = int(part[1]), part[2]
        if not name.startswith(_BY_HEADS) or not placements[0].is_shard(0):
            raise InvalidInput(
                f"layer {layer} has {name} split as {placements}: the fast path knows plans that "
                f"leave attention whole but for its index heads; load the model with "
                f"{_KNOWN_PLANS}"
            )
        if model.config.index_n_heads % mesh.size():
            raise InvalidInput(
                f"{model.config.index_n_heads} index heads on {mesh.size()} ranks: a head "
                f"cannot be split; use a number of ranks that divides them"
            )
        heads.setdefault(layer, set()).add(name.rpartition(".")[0])
    for layer, names in heads.items():
        if len(names) != len(_BY_HEADS):
            raise InvalidInput(
                f"layer {layer} has {', '.join(names)} split by heads and the rest of its indexer "
                f"whole: load the model with {_KNOWN_PLANS}"
            )
    device = first.to_local().device
    return Ranks(first.device_mesh.get_group(), len(ranks), device, frozenset(heads))


def _check_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer, "self_attn"):
            raise InvalidInput(
                f"layer {index} is {type(layer).__name__}: this process has only some layers of "
                f"the model, and the fast path needs all; load it with {_KNOWN_PLANS}, or with "
                f"device_map"
            )


def _split_parameters(model: Any) -> dict[str, Any]:
    """Parameters of which this process has a part, by name."""
    from torch.distributed.tensor import DTensor

    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and not all(placement.is_replicate() for placement in parameter.placements)
    }
