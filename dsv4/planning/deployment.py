"""What fits on some GPUs when weights, workspace and snapshots have taken their part. Torch-free.

Each rank holds its share of the weights, the activations that were asked for, what a manager
allocates in addition to its cache, and its requests. The longest request may be as long as the
model allows, whatever context is asked about: block tables and workspace are made for that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PoolTooSmall, require_count
from dsv4.model import LayerSpec, ModelSpec
from dsv4.planner import TierSizing, plan_tier
from dsv4.planning.gpus import Gpus
from dsv4.planning.layouts import (
    Layout,
    check_layout,
    other_layouts,
    stages,
    weights_of_rank,
)
from dsv4.planning.peers import PeerCache, peers_of
from dsv4.planning.weights import Tensors, WeightShapes, tensors_of
from dsv4.planning.workspace import snapshot_pool_bytes, workspace_of
from dsv4.residency_planner import plan_residency

# of the model and its options
MakeSchema = Callable[[ModelSpec], CacheSchema]
CONTEXTS = (8 << 10, 128 << 10, 1 << 20)
LINK_BYTES_PER_SECOND = 55 * 10**9
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is on each GPU in addition to weights and requests: steps of up to `step_tokens` tokens,
    `snapshots` of the prefix cache, `activations_bytes` of the model (0: not counted).
    `host_memory_bytes` is that of all GPUs together, for entries of requests; `disk_bytes` a tier
    of all of them."""

    step_tokens: int = 8192
    snapshots: int = 64
    activations_bytes: int = 0
    host_memory_bytes: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        require_count("step_tokens", self.step_tokens)
        for name in ("snapshots", "activations_bytes"):
            require_count(name, getattr(self, name), at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What a GPU of the fullest stage holds. `workspace` is that of the first context's number of
    requests, step buffers and snapshots included. `left` is for requests."""

    memory: int
    weights: int
    activations: int
    workspace: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Requests of a context at once, over all GPUs. `peers`: at least and at most, by name;
    `with_host_memory`: those whose entries may live there."""

    context_tokens: int
    requests: int
    request_bytes: int
    with_host_memory: int | None = None
    peers: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFit:
    """Of one layout: the fullest rank, and requests by context. `why_not` says what it cannot."""

    layout: str
    cache: str
    rank: RankBytes | None
    fits: tuple[Fit, ...]
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The answer. `weights_bytes` is the checkpoint without draft layers, unless these run;
    `needed_gpus` is given where nothing fits: as many of the same GPU as would hold one request of
    the shortest context that was asked for, with data-parallel attention (None: no number does).
    `weights_formats` are those of routed experts and of projections, none where their size was
    given; `weights_from` says where they are from.
    `fits` is False where fewer requests fit than were asked for."""

    model: str
    gpus: str
    count: int
    weights_bytes: int
    weights_by_format: dict[str, int]
    weights_formats: tuple[str, ...]
    weights_from: str
    chosen: LayoutFit
    others: tuple[LayoutFit, ...]
    asked_requests: int | None
    fits: bool
    needed_gpus: int | None
    snapshots: int
    step_tokens: int
    tier: TierSizing | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """`tensors` as derived from a config, or only `total_bytes`, as given: then all of it is
    divided over all ranks as if it were experts."""

    tensors: list[Tensors]
    total_bytes: int
    shapes: WeightShapes | None = None

    @classmethod
    def derived(cls, model: ModelSpec, shapes: WeightShapes, *, drafts: bool) -> Weights:
        """Those of the config. Draft layers' only if they run."""
        without = frozenset(s.layer for s in model.layers if s.draft and not drafts)
        tensors = [each for each in tensors_of(model, shapes) if each.layer not in without]
        total = sum(each.bytes for each in tensors)
        return cls(tensors=tensors, total_bytes=total, shapes=shapes)

    @classmethod
    def given(cls, total_bytes: int) -> Weights:
        return cls(tensors=[], total_bytes=require_count("weights", total_bytes))

    @property
    def by_format(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in self.tensors:
            found[each.format] = found.get(each.format, 0) + each.bytes
        return found

    @property
    def formats(self) -> tuple[str, ...]:
        """Of routed experts and of projections; one where they are the same."""
        if self.shapes is None:
            return ()
        return tuple(dict.fromkeys((self.shapes.expert_format, self.shapes.dense_format)))

    def of_rank(self, layers: range, layout: Layout, *, last: bool) -> int:
        if not self.tensors:
            return -(-self.total_bytes // layout.gpus)
        return weights_of_rank(self.tensors, layers, layout, last=last)


def deploy(
    model: ModelSpec,
    gpus: Gpus,
    weights: Weights,
    *,
    layout: Layout,
    make_schema: MakeSchema,
    contexts: Sequence[int] = CONTEXTS,
    requests: int | None = None,
    load: Load | None = None,
    compare: bool = True,
) -> Deployment:
    """How many requests of each context these GPUs hold at once; with `compare` in other layouts
    too. Of several contexts those are left out that are longer than the model's. Raises
    InvalidInput."""
    load = load or Load()
    for context in contexts:
        require_count("context_tokens", context)
    if requests is not None:
        require_count("requests", requests)
    check_layout(layout, model, weights.shapes)
    asked = [c for c in contexts if c <= model.max_context]
    if not asked and len(contexts) == 1:
        raise InvalidInput(
            f"a context of {contexts[0]:,} tokens is past the {model.max_context:,} that a request "
            f"of {model.name} may have: ask for less"
        )
    asked = asked or [model.max_context]
    job = _Job(model, gpus, weights, make_schema, asked, load)
    chosen = job.fit(layout)
    others = tuple(job.try_fit(each) for each in other_layouts(layout) if compare)
    enough = chosen.fits[0].requests >= (requests or 1)
    needed = None
    if not enough:
        needed = job.gpus_for(requests or 1)
    tier = None
    if load.disk_bytes is not None:
        tier = plan_tier(make_schema(model), tier_bytes=load.disk_bytes)
    return Deployment(
        model=model.name,
        gpus=gpus.text,
        count=gpus.count,
        weights_bytes=weights.total_bytes,
        weights_by_format=weights.by_format,
        weights_formats=weights.formats,
        weights_from="given" if weights.shapes is None else weights.shapes.formats_from,
        chosen=chosen,
        others=others,
        asked_requests=requests,
        fits=enough,
        needed_gpus=needed,
        snapshots=load.snapshots,
        step_tokens=load.step_tokens,
        tier=tier,
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """A rank of one stage: its schema, what it has left for requests and their manager, and what a
    manager of that many requests has in addition to them."""

    schema: CacheSchema
    others: Callable[[int], int]
    weights: int
    left: int


@dataclass(frozen=True, slots=True)
class _Job:
    """One question, for any layout."""

    model: ModelSpec
    gpus: Gpus
    weights: Weights
    make_schema: MakeSchema
    contexts: Sequence[int]
    load: Load
    managers: dict[tuple[LayerSpec, ...], tuple[CacheSchema, Callable[[int], int]]] = field(
        default_factory=dict
    )

    def fit(self, layout: Layout) -> LayoutFit:
        found = [
            self._stage(layout, layers, part) for layers, part in stages(self.model, layout.pp)
        ]
        fullest = min(found, key=lambda stage: stage.left)
        fits = tuple(self._fit(layout, found, context) for context in self.contexts)
        first = max(1, -(-fits[0].requests // layout.dp))
        workspace = fullest.others(first)
        rank = RankBytes(
            memory=self.gpus.gpu.memory_bytes,
            weights=fullest.weights,
            activations=self.load.activations_bytes,
            workspace=workspace,
            left=fullest.left - workspace,
        )
        return LayoutFit(layout=layout.text, cache=layout.cache, rank=rank, fits=fits)

    def try_fit(self, layout: Layout) -> LayoutFit:
        try:
            check_layout(layout, self.model, self.weights.shapes)
        except InvalidInput as error:
            return LayoutFit(
                layout=layout.text, cache=layout.cache, rank=None, fits=(), why_not=str(error)
            )
        return self.fit(layout)

    def gpus_for(self, requests: int) -> int | None:
        """The fewest of the same GPU that hold that many requests of the first context."""
        counts = range(1, _MOST_GPUS + 1)
        if self.weights.shapes is not None:
            counts = range(1, min(_MOST_GPUS, self.weights.shapes.experts) + 1)

        def enough(count: int) -> bool:
            layout = Layout(dp=count)
            layers, part = next(iter(stages(self.model, 1)))
            stage = self._stage(layout, layers, part)
            return self._of_rank(stage, self.contexts[0]) * count >= requests

        first = bisect_right(counts, False, key=enough)
        return None if first == len(counts) else counts[first]

    def _stage(self, layout: Layout, layers: range, part: ModelSpec) -> _Stage:
        last = layers.stop == len(self.model.layers)
        weights = self.weights.of_rank(layers, layout, last=last)
        left = self.gpus.gpu.memory_bytes - weights - self.load.activations_bytes
        return _Stage(*self._manager(part), weights, left)

    def _manager(self, part: ModelSpec) -> tuple[CacheSchema, Callable[[int], int]]:
        if part.layers not in self.managers:
            schema = self.make_schema(part)
            snapshots = snapshot_pool_bytes(schema, self.load.snapshots)
            of = workspace_of(schema, self.gpus.gpu, max_step_tokens=self.load.step_tokens)
            self.managers[part.layers] = schema, lambda requests: of(requests) + snapshots
        return self.managers[part.layers]

    def _of_rank(self, stage: _Stage, context: int) -> int:
        each = stage.schema.bytes.of_request(context)
        counts = range(1, max(0, stage.left) // each + 1)
        return bisect_right(
            counts, stage.left, key=lambda count: count * each + stage.others(count)
        )

    def _fit(self, layout: Layout, found: list[_Stage], context: int) -> Fit:
        peers: tuple[PeerCache, ...] = peers_of(self.model) if layout.pp == 1 else ()
        return Fit(
            context_tokens=context,
            requests=layout.dp * min(self._of_rank(stage, context) for stage in found),
            request_bytes=sum(stage.schema.bytes.of_request(context) for stage in found),
            with_host_memory=self._with_host_memory(layout, found, context),
            peers={
                peer.name: (layout.dp * low, layout.dp * high)
                for peer in peers
                for low, high in (peer.requests(found[0].left, context),)
            },
        )

    def _with_host_memory(self, layout: Layout, found: list[_Stage], context: int) -> int | None:
        if self.load.host_memory_bytes is None:
            return None
        of_rank = self.load.host_memory_bytes // layout.gpus
        least = None
        for stage in found:
            try:
                count = plan_residency(
                    stage.schema,
                    memory_bytes=max(1, stage.left),
                    host_memory_bytes=max(1, of_rank),
                    link_bytes_per_second=LINK_BYTES_PER_SECOND,
                    context_tokens=context,
                    step_tokens=self.load.step_tokens,
                    other_bytes=stage.others,
                ).requests
            except PoolTooSmall:
                count = 0
            least = count if least is None else min(least, count)
        return layout.dp * (least or 0)
