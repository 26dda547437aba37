"""A question as people put it: the name of a model, GPUs in words. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.cache.schema import CacheSchema
from dsv4.errors import ConfigError
from dsv4.model import ModelSpec, config_path, preset_name, read_config
from dsv4.planning.deployment import CONTEXTS, Deployment, Load, MakeSchema, Weights, deploy
from dsv4.planning.gpus import Gpus, parse_gpus
from dsv4.planning.layouts import layout_of
from dsv4.planning.weights import PRESET_WEIGHTS, weight_shapes
from dsv4.units import parse_bytes


def plan_gpus(
    name: str,
    gpus: str,
    *,
    make_schema: MakeSchema,
    tp: int | None,
    pp: int | None,
    weights: str | None,
    drafts: bool,
    load: Load,
    contexts: Sequence[int] = CONTEXTS,
    requests: int | None = None,
    compare: bool = True,
) -> tuple[Deployment, Gpus]:
    """The answer, and the GPUs as they were written. Raises InvalidInput, ConfigError."""
    model, found = ModelSpec.load(name), parse_gpus(gpus)
    return (
        deploy(
            model,
            found,
            weights_of(name, model, weights, drafts=drafts),
            layout=layout_of(found.count, tp=tp, pp=pp),
            make_schema=make_schema,
            contexts=contexts,
            requests=requests,
            load=load,
            compare=compare,
        ),
        found,
    )


def weights_of(name: str, model: ModelSpec, size: str | None, *, drafts: bool) -> Weights:
    """As given, or derived from the preset or the config. Raises ConfigError."""
    if size is not None:
        return Weights.given(parse_bytes(size))
    path = config_path(name)
    if path is None:
        shapes = PRESET_WEIGHTS.get(preset_name(name) or "")
    else:
        shapes = weight_shapes(read_config(path))
    if shapes is None:
        raise ConfigError(
            f"the weights of {model.name} cannot be derived from what is known of it: give their "
            f"size, --weights 150GB"
        )
    return Weights.derived(model, shapes, drafts=drafts)


def schema_maker(**options: object) -> MakeSchema:
    def make(model: ModelSpec) -> CacheSchema:
        return CacheSchema.build(model, **options)  # type: ignore[arg-type]

    return make
