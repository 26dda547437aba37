"""How a model is divided over GPUs, and what that does to its cache. Torch-free.

    tp    tensor parallelism: heads, shared expert, embeddings and head are divided; V4 has one key
          for all heads, so every rank keeps the whole cache: the same requests, over and over
    dp    data-parallel attention: what is not a routed expert is complete in each rank, and each
          rank has requests of its own
    pp    pipeline parallelism: each stage has some of the layers, of the weights and of the cache

Routed experts are divided over all tp × dp ranks of a stage (expert parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4.errors import InvalidInput, require_count
from dsv4.model import ModelSpec
from dsv4.planning.weights import Tensors, WeightShapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`tp` × `dp` × `pp` GPUs."""

    tp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp"):
            require_count(name, getattr(self, name))

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def ep(self) -> int:
        """Over how many ranks the routed experts are divided."""
        return self.tp * self.dp

    @property
    def text(self) -> str:
        parts = [f"TP {self.tp}"] if self.tp > 1 else []
        if self.dp > 1:
            parts.append(f"EP {self.ep}, DP {self.dp}")
        elif self.tp > 1:
            parts.append(f"EP {self.ep}")
        if self.pp > 1:
            parts.append(f"PP {self.pp}")
        return ", ".join(parts) or "one GPU"

    @property
    def cache(self) -> str:
        """Which share of the cache a rank has."""
        parts = [f"replicated in {self.tp} ranks"] if self.tp > 1 else []
        if self.dp > 1:
            parts.append("divided by requests")
        if self.pp > 1:
            parts.append("divided by layers")
        return ", ".join(parts) or "whole in it"


def layout_of(gpus: int, *, tp: int | None = None, pp: int | None = None) -> Layout:
    """What is not tensor or pipeline parallel has requests of its own. Raises InvalidInput."""
    tp, pp = require_count("tp", tp or 1), require_count("pp", pp or 1)
    if gpus % (tp * pp):
        raise InvalidInput(f"{gpus} GPUs are not a multiple of tp x pp = {tp} x {pp}")
    return Layout(tp=tp, pp=pp, dp=gpus // tp // pp)


def other_layouts(layout: Layout) -> Iterator[Layout]:
    """All GPUs in one way, without the one that was asked for."""
    for each in (Layout(dp=layout.gpus), Layout(tp=layout.gpus), Layout(pp=layout.gpus)):
        if each != layout and layout.gpus > 1:
            yield each


def check_layout(layout: Layout, model: ModelSpec, shapes: WeightShapes | None) -> None:
    """Raises InvalidInput for what cannot be divided so."""
    groups = model.heads if shapes is None else shapes.output_groups
    if model.heads % layout.tp or (groups % layout.tp and layout.tp % groups):
        raise InvalidInput(
            f"tp={layout.tp}: {model.name} has {model.heads} heads, whose outputs are projected in "
            f"{groups} groups; give a tp that divides both"
        )
    backbone = sum(not spec.draft for spec in model.layers)
    if layout.pp > backbone:
        raise InvalidInput(f"pp={layout.pp}: {model.name} has only {backbone} layers")
    if layout.pp > 1 and any(spec.owner != spec.layer for spec in model.layers):
        raise InvalidInput(
            f"pp={layout.pp}: layers of {model.name} read the entries of earlier layers, which "
            f"stages do not share: use tp or data-parallel attention"
        )
    if shapes is not None and layout.ep > shapes.experts:
        raise InvalidInput(
            f"{layout.ep} ranks would share the routed experts of a layer, and {model.name} has "
            f"{shapes.experts} experts: give at most {shapes.experts * layout.pp} GPUs, or plan "
            f"one cache with --memory"
        )


# ---- stages of a pipeline ------------------------------------------------------------------------


def stages(model: ModelSpec, pp: int) -> Iterator[tuple[range, ModelSpec]]:
    """Layers of each stage, as equally many as can be, and a model of these alone; draft layers are
    with the last."""
    backbone = sum(not spec.draft for spec in model.layers)
    for nth in range(pp):
        first, end = backbone * nth // pp, backbone * (nth + 1) // pp
        if nth == pp - 1:
            end = len(model.layers)
        if pp == 1:
            yield range(end), model
            continue
        layers = tuple(
            replace(spec, layer=spec.layer - first, owner=spec.owner - first)
            for spec in model.layers[first:end]
        )
        yield range(first, end), replace(model, layers=layers)


def weights_of_rank(tensors: list[Tensors], layers: range, layout: Layout, *, last: bool) -> int:
    """Bytes of a rank of the stage with these layers: embeddings are with the first, head and last
    norm with the last."""
    total = 0
    for each in tensors:
        size = each.bytes
        if each.layer is None:
            whole = layers.start == 0 and last
            if each.divided == "heads":  # embeddings and head, half of it each
                size = size if whole else size // 2 if layers.start == 0 or last else 0
            elif not last:
                continue
        elif each.layer not in layers:
            continue
        ranks = {"experts": layout.ep, "heads": layout.tp, "nowhere": 1}[each.divided]
        total += -(-size // ranks)
    return total
