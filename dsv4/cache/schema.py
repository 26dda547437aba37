"""The schema: one model and one choice of parameters, with what follows from them: what each
layer keeps, fingerprints, how a budget divides. Torch-free and frozen.

What lies at which byte, and how large the rows of the arenas are, `layout.py` computes
(`schema.layout`, `schema.bytes`):

    block arena   uint8 [num_blocks, bytes.block]   what the model keeps of `block_tokens` tokens
    slot arena    uint8 [num_slots,  bytes.slot]    what a live request has in addition to blocks
    entries arena uint8 [rows, bytes.entries]       with `entries_apart`: of a block, the entries of
                                                    the layers that select, which may leave the
                                                    device; the block arena has the rest

Within a block (and a slot) the layers follow each other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import lcm
from typing import Any, Literal, get_args

from dsv4.cache import records
from dsv4.cache.layout import BLOCK_ID_BYTES, CacheBytes, Layout, lay_out
from dsv4.cache.pages import ArenaName, PageForm
from dsv4.cache.records import RecordFormat
from dsv4.errors import InvalidInput, PoolTooSmall, SchemaError, require_count, require_flag
from dsv4.model import AttentionType, LayerSpec, ModelSpec

__all__ = [
    "AttentionType",
    "BlockBudget",
    "CacheSchema",
    "HcaState",
    "LayerCacheSchema",
    "byte_map",
    "bytes_by_kind",
    "compute_block_budget",
    "row_bytes",
]

HcaState = Literal["raw", "online"]
LAYOUT_VERSION = 2  # 1 left padding bytes as they were; they are 0 now


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSchema:
    """What one layer keeps: rows per block in the block arena, rings in the slot arena.

    `tail_a_rows` is the ring of the current stream, `tail_b_rows` that of the previous one (only
    layers whose groups overlap have it). Both are addressed by token position modulo their length,
    and so is the ring of `state_rows`, which a layer with online state has instead.
    """

    spec: LayerSpec
    block_tokens: int
    window: int
    ring_rows: int
    max_rollback_tokens: int
    hca_state: HcaState

    @property
    def entries_per_block(self) -> int:
        return self.block_tokens // self.spec.ratio if self.spec.owns_entries else 0

    @property
    def index_keys_per_block(self) -> int:
        return 0 if self.spec.index_keys == "none" else self.entries_per_block

    @property
    def tail_a_rows(self) -> int:
        """A group of one token closes at once and needs no tail. With `tail_skips_last`, each group
        that a draft completes also leaves one row out."""
        ratio, drafts = self.spec.ratio, self.max_rollback_tokens - 1
        if not self.spec.owns_entries or ratio == 1 or self.online:
            return 0
        if self.tail_skips_last:
            return ratio - 1 + drafts - drafts // ratio
        return ratio + drafts

    @property
    def tail_skips_last(self) -> bool:
        """Whether the tail leaves out the last token of each group, which closes it: with groups of
        two, that is half of the tail. Groups are then closed only by `append`, never from the
        tail."""
        return self.spec.owns_entries and self.spec.tail_skips_last

    @property
    def online(self) -> bool:
        """Only HCA layers: folding a group of a few tokens would take more bytes than it saves."""
        spec = self.spec
        return (
            self.hca_state == "online"
            and spec.attention is AttentionType.HCA
            and spec.owns_entries
            and not spec.overlap
            and spec.index_keys == "none"
            and spec.ratio > 1
        )

    @property
    def state_rows(self) -> int:
        """The newest token's state and those of the max_rollback_tokens before it, to which a
        request can be rolled back."""
        return 1 + self.max_rollback_tokens if self.online else 0

    @property
    def tail_b_rows(self) -> int:
        """Previous group + current group (the next one's previous) + what a draft may write."""
        if not (self.spec.owns_entries and self.spec.overlap):
            return 0
        return 2 * self.spec.ratio + self.max_rollback_tokens - 1


@dataclass(frozen=True, kw_only=True)
class CacheSchema:
    """The complete layout for one model and one choice of parameters. Make it with `build`.

    `block_tokens` tokens are a block, every plane starts at a multiple of `align_bytes`, and a
    window's ring has `ring_rows` rows: enough to take back `max_draft_tokens` drafts with
    `steps_ahead` steps planned before their results are known. A request has up to `max_context`
    tokens. `entry_format`, `window_format` and `index_format` are how entries, window rows and
    index keys are stored, `hca_state` how unfinished groups of HCA layers are. With `entries_apart`
    entries may live in host memory (docs/residency.md). `page_form` says how the records of entries
    and window rows lie in their pages.
    """

    model: ModelSpec
    block_tokens: int
    align_bytes: int
    ring_rows: int
    max_draft_tokens: int
    steps_ahead: int
    max_context: int
    entry_format: RecordFormat
    window_format: RecordFormat
    index_format: RecordFormat
    hca_state: HcaState
    entries_apart: bool = False
    page_form: PageForm = "planes"

    def __repr__(self) -> str:
        whole = ", records whole" if self.page_form == "records" else ""
        apart = f" and {self.bytes.entries:,} bytes of entries apart" if self.entries_apart else ""
        return (
            f"CacheSchema({self.model.name}: {len(self.layers)} layers, blocks of "
            f"{self.block_tokens} tokens and {self.bytes.block:,} bytes{apart}, slots of "
            f"{self.bytes.slot:,} bytes, entries {self.entry_format.name}, window "
            f"{self.window_format.name}, index keys {self.index_format.name}{whole}, "
            f"max_context={self.max_context}, layout {self.fingerprint[:12]})"
        )

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        *,
        block_tokens: int = 128,
        align_bytes: int = 32,
        ring_rows: int | None = None,
        max_draft_tokens: int = 0,
        steps_ahead: int = 0,
        max_context: int | None = None,
        entry_format: str | RecordFormat | None = None,
        window_format: str | RecordFormat | None = None,
        index_format: str | RecordFormat = "mxfp4",
        hca_state: HcaState = "raw",
        entries_apart: bool = False,
        page_form: PageForm = "planes",
    ) -> CacheSchema:
        """Lays a model out.

        `block_tokens` must be a multiple of every ratio. `align_bytes` is where pages start (32: a
        memory sector; 576 where SM100's TMA asks for it). `ring_rows` is the length of the window
        ring, by default the shortest that survives the rejection of `1 + max_draft_tokens` tokens
        in each of 1 + `steps_ahead` steps: `steps_ahead` steps may be planned after one whose
        results are not on the host yet. `entry_format` and `window_format` default to those that
        the model was trained with; if only the first is given, it is used for both. `hca_state`
        says how HCA layers keep their unfinished group: "raw", every token of it, or "online",
        folded into a running softmax. With `entries_apart` the entries of layers that select lie
        in an arena of their own, so that they can leave the device (docs/residency.md); stored
        records then have another layout. `page_form` is how the records of a page lie: "planes",
        all data rows and then all scale rows, or "records", each record whole, as FlashMLA reads
        V4.1's since 2026-09-30 (docs/layout.md); only V4.1's formats, and index keys stay planes.
        Raises SchemaError or InvalidInput.
        """
        require_flag("entries_apart", entries_apart)
        block_tokens = require_count("block_tokens", block_tokens)
        align_bytes = require_count("align_bytes", align_bytes)
        max_draft_tokens = require_count("max_draft_tokens", max_draft_tokens, at_least=0)
        steps_ahead = require_count("steps_ahead", steps_ahead, at_least=0)
        rollback = (1 + steps_ahead) * (1 + max_draft_tokens)
        context = require_count(
            "max_context", model.max_context if max_context is None else max_context
        )
        if not isinstance(hca_state, str) or hca_state not in get_args(HcaState):
            raise InvalidInput(
                f"hca_state={hca_state!r}: choose one of {', '.join(get_args(HcaState))}"
            )
        if not isinstance(page_form, str) or page_form not in get_args(PageForm):
            raise InvalidInput(
                f"page_form={page_form!r}: choose one of {', '.join(get_args(PageForm))}"
            )
        if context > model.max_context:
            raise SchemaError(
                f"max_context={context} is past the {model.max_context} positions of {model.name}"
            )
        group = lcm(*(spec.ratio for spec in model.layers if spec.ratio), 1)
        if block_tokens % group:
            raise SchemaError(
                f"block_tokens={block_tokens} does not hold whole groups: the compress ratios of "
                f"{model.name} need a multiple of {group}"
            )
        if align_bytes % 16:
            raise SchemaError(
                f"align_bytes={align_bytes}: pages must start on 16 bytes for vector loads, "
                f"so give a multiple of 16"
            )
        shortest = model.window + rollback - 1
        rows = shortest if ring_rows is None else require_count("ring_rows", ring_rows)
        if rows < shortest:
            raise SchemaError(
                f"a ring of {rows} rows cannot survive max_draft_tokens={max_draft_tokens}"
                + (f" in {1 + steps_ahead} steps" if steps_ahead else "")
                + f": a rejected draft would overwrite the window of {model.window}; use ring_rows "
                f">= {shortest}"
                + ("" if steps_ahead else f" or at most {max(rows - model.window, 0)} drafts")
            )
        if window_format is None:
            window_format = model.window_format if entry_format is None else entry_format
        entry = _resolve_entry(model.entry_format if entry_format is None else entry_format, model)
        window = _resolve_entry(window_format, model)
        if entry.value_dtype != window.value_dtype:
            raise SchemaError(
                f"entries as {entry.name} are {entry.value_dtype} values and window rows as "
                f"{window.name} are {window.value_dtype}: one attention reads both, so choose "
                f"formats of one type"
            )
        if page_form == "records":
            _require_whole_records(entry, window)
        return cls(
            model=model,
            block_tokens=block_tokens,
            align_bytes=align_bytes,
            ring_rows=rows,
            max_draft_tokens=max_draft_tokens,
            steps_ahead=steps_ahead,
            max_context=context,
            entry_format=entry,
            window_format=window,
            index_format=_resolve_index(index_format, model),
            hca_state=hca_state,
            entries_apart=entries_apart,
            page_form=page_form,
        )

    def __post_init__(self) -> None:
        _ = self._laid_out  # an impossible layout is refused here, not when it is first read

    # ---- what follows from them ------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[LayerCacheSchema, ...]:
        return tuple(
            LayerCacheSchema(
                spec=spec,
                block_tokens=self.block_tokens,
                window=self.model.window,
                ring_rows=self.ring_rows,
                max_rollback_tokens=self.max_rollback_tokens,
                hca_state=self.hca_state,
            )
            for spec in self.model.layers
        )

    @cached_property
    def _laid_out(self) -> tuple[Layout, dict[ArenaName, int]]:
        return lay_out(self)

    @property
    def layout(self) -> Layout:
        """Which byte is where: pages, planes, compressors."""
        return self._laid_out[0]

    @cached_property
    def bytes(self) -> CacheBytes:
        """How large everything is: a block, a slot, what a request costs."""
        sizes = self._laid_out[1]
        return CacheBytes(
            block=sizes["block"],
            slot=sizes["slot"],
            entries=sizes["entries"],
            block_tokens=self.block_tokens,
            block_table_row=self.max_blocks_per_request * BLOCK_ID_BYTES,
        )

    # ---- counts ----------------------------------------------------------------------------

    @cached_property
    def max_blocks_per_request(self) -> int:
        return self.blocks_for(self.max_context)

    @cached_property
    def max_rollback_tokens(self) -> int:
        """How many of the newest written tokens the rings can lose: those of a decode step, and of
        the steps that may be planned after it."""
        return (1 + self.steps_ahead) * self.max_decode_tokens

    @cached_property
    def max_decode_tokens(self) -> int:
        """The most tokens of a request in a decode batch, and the most that a commit may reject:
        1 + max_draft_tokens."""
        return 1 + self.max_draft_tokens

    @cached_property
    def draft_layers(self) -> frozenset[int]:
        """Layers that draft: MTP and DSpark, which not every engine runs."""
        return frozenset(spec.layer for spec in self.model.layers if spec.draft)

    @cached_property
    def backbone_layers(self) -> tuple[int, ...]:
        """All other layers: a step counts once they have stored it."""
        return tuple(spec.layer for spec in self.model.layers if not spec.draft)

    def blocks_for(self, tokens: int) -> int:
        """A model of window-only layers keeps nothing in blocks and needs none."""
        if not self._laid_out[1]["block"]:
            return 0
        return -(-tokens // self.block_tokens)

    @cached_property
    def content_fingerprint(self) -> str:
        """Identifies the content of blocks and snapshots: with equal ones, those of two caches can
        be exchanged. It does not depend on ring sizes and drafts, because these concern slots only,
        nor on lengths and names that move no byte (max_context, the model's name, its numbers of
        heads)."""
        model = asdict(self.model)
        for field in ("name", "max_context", "heads", "index_heads", "draft_block"):
            del model[field]
        del model["entry_format"], model["window_format"]  # the formats are below
        del model["cut_replays"]  # what follows a cut replay is never cached
        if not self.model.candidate_blocks:
            del model["candidate_blocks"], model["candidate_block_entries"]
        for layer in model["layers"]:
            for field, usual in _usual_facts(layer).items():
                if layer[field] == usual:
                    del layer[field]
        return _digest(
            {
                "layout_version": LAYOUT_VERSION,
                "model": model,
                "online": [layer.online for layer in self.layers],
                "block_tokens": self.block_tokens,
                "align_bytes": self.align_bytes,
                "formats": [
                    asdict(f) for f in (self.entry_format, self.window_format, self.index_format)
                ],
                "block_planes": [
                    asdict(plane) for plane in self.layout.planes if plane.arena == "block"
                ],
                "block_bytes": self.bytes.block,
                **self._apart_facts(),
                **({} if self.page_form == "planes" else {"page_form": self.page_form}),
            }
        )

    def _apart_facts(self) -> dict[str, object]:
        """Left out of fingerprints where nothing is apart."""
        if not self.bytes.entries:
            return {}
        planes = [asdict(plane) for plane in self.layout.planes if plane.arena == "entries"]
        return {"entries_planes": planes, "entries_bytes": self.bytes.entries}

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the whole layout: with equal ones, slots can be exchanged too."""
        return _digest(
            {
                "content": self.content_fingerprint,
                "slot_planes": [
                    asdict(plane) for plane in self.layout.planes if plane.arena == "slot"
                ],
                "slot_bytes": self.bytes.slot,
            }
        )


def row_bytes(schema: CacheSchema, arena: ArenaName) -> int:
    """Bytes of a row of an arena."""
    if arena == "entries":
        return schema.bytes.entries
    return schema.bytes.block if arena == "block" else schema.bytes.slot


def bytes_by_kind(schema: CacheSchema) -> dict[str, dict[str, int]]:
    """Bytes of each plane kind in a block, wherever it lies, and in a slot, and what alignment
    and scale-row padding add. The first column sums to `bytes.block` and `bytes.entries`, the
    second to `bytes.slot`."""
    result: dict[str, dict[str, int]] = {"block": {}, "slot": {}}
    for plane in schema.layout.planes:
        kinds = result["slot" if plane.arena == "slot" else "block"]
        kind = f"{schema.model.layers[plane.layer].attention} {plane.kind}"
        kinds[kind] = kinds.get(kind, 0) + plane.payload_bytes
    for arena, total in (
        ("block", schema.bytes.block + schema.bytes.entries),
        ("slot", schema.bytes.slot),
    ):
        result[arena]["padding"] = total - sum(result[arena].values())
    return result


def byte_map(schema: CacheSchema, arena: ArenaName) -> str:
    """The planes of an arena's row, one per line: offset, bytes, shape, dtype, name."""
    total = row_bytes(schema, arena)
    whole = ", records of entries and windows whole" if schema.page_form == "records" else ""
    lines = [f"{arena}: {total:,} bytes, pages aligned to {schema.align_bytes}{whole}"]
    for plane in schema.layout.planes:
        if plane.arena != arena:
            continue
        shape = "x".join(str(extent) for extent in plane.shape)
        lines.append(
            f"{plane.offset_bytes:>12,}  {plane.payload_bytes:>9,} B  {shape:>9} "
            f"{plane.dtype:<14} layer {plane.layer:<3} {plane.name}"
        )
    return "\n".join(lines)


def _usual_facts(layer: dict[str, Any]) -> dict[str, object]:
    """Facts of a layer as V4 and V4.1 have them. These are left out of fingerprints, most of which
    are older than the fields."""
    latent = layer["index_keys"] == "latent"
    return {
        "selector": None,
        "candidates_of": None,
        "gated": layer["ratio"] > 1 or not latent,
        "tail_skips_last": latent and not layer["overlap"],
        "index_hadamard": not latent,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBudget:
    """How a memory budget splits into `num_blocks` blocks and slots of `max_requests` requests:
    `block_arena_bytes`, `slot_arena_bytes`, the `block_table_bytes` of their ids, and
    `unused_bytes` that make no whole block. `other_bytes` is what else the manager
    needs: step buffers, workspace and snapshots. Of entries that are kept apart, `entry_rows`
    blocks have theirs on the device, `entries_arena_bytes` (without hot rows, which `other_bytes`
    counts), and all have
    `host_bytes` in host memory."""

    num_blocks: int
    max_requests: int
    block_arena_bytes: int
    slot_arena_bytes: int
    block_table_bytes: int
    unused_bytes: int
    other_bytes: int = 0
    entry_rows: int = 0
    entries_arena_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the device."""
        cache = self.block_arena_bytes + self.slot_arena_bytes + self.block_table_bytes
        return cache + self.entries_arena_bytes + self.other_bytes


def compute_block_budget(
    schema: CacheSchema,
    *,
    memory_bytes: int,
    max_requests: int,
    context: int | None = None,
    other_bytes: int = 0,
    host_bytes: int | None = None,
    needed_entry_rows: int = 0,
) -> BlockBudget:
    """Gives each of `max_requests` a slot, and blocks what is left of `memory_bytes`, less
    `other_bytes`. `dsv4.other_bytes` says what else a manager needs. With entries that
    are kept apart, `host_bytes` is the host memory for them; at least `needed_entry_rows` blocks
    have theirs on the device, and more if memory is left.

    Raises PoolTooSmall, with the minimum, when the blocks left could not hold one request of
    `context` tokens (default: the schema's max_context).
    """
    memory_bytes = require_count("memory_bytes", memory_bytes, at_least=0)
    max_requests = require_count("max_requests", max_requests)
    tokens = schema.max_context if context is None else require_count("context", context)
    if tokens > schema.max_context:
        raise InvalidInput(
            f"context={tokens} is past max_context={schema.max_context} of the schema"
        )
    other_bytes = require_count("other_bytes", other_bytes, at_least=0)
    fixed = max_requests * schema.bytes.per_request + other_bytes
    needed = schema.blocks_for(tokens) if schema.bytes.block else 0
    if schema.bytes.entries:
        return _budget_apart(
            schema,
            memory_bytes=memory_bytes,
            max_requests=max_requests,
            other_bytes=other_bytes,
            needed=needed,
            host_bytes=host_bytes,
            least_rows=needed_entry_rows,
        )
    blocks = max(0, memory_bytes - fixed) // schema.bytes.block if schema.bytes.block else 0
    if memory_bytes < fixed or blocks < needed:
        minimum = fixed + needed * schema.bytes.block
        raise PoolTooSmall(
            f"{memory_bytes:,} bytes leave {blocks:,} blocks of {schema.bytes.block:,} bytes after "
            f"{max_requests:,} request slot{'' if max_requests == 1 else 's'} of "
            f"{schema.bytes.per_request:,}"
            + (f" and {other_bytes:,} in addition" if other_bytes else "")
            + f", but one request of {tokens:,} tokens needs {needed:,} blocks: give at least "
            f"{minimum:,} bytes, or ask for fewer requests or less context",
            minimum_bytes=minimum,
        )
    used = fixed + blocks * schema.bytes.block
    return BlockBudget(
        num_blocks=blocks,
        max_requests=max_requests,
        block_arena_bytes=blocks * schema.bytes.block,
        slot_arena_bytes=max_requests * schema.bytes.slot,
        block_table_bytes=max_requests * schema.bytes.block_table_row,
        unused_bytes=memory_bytes - used,
        other_bytes=other_bytes,
    )


def _budget_apart(
    schema: CacheSchema,
    *,
    memory_bytes: int,
    max_requests: int,
    other_bytes: int,
    needed: int,
    host_bytes: int | None,
    least_rows: int,
) -> BlockBudget:
    """The same with entries apart: what stays of every block on the device, its entries in host
    memory, and as many of them as fit on the device too."""
    if host_bytes is None:
        raise InvalidInput(
            "the entries of this schema are kept apart: say how much host memory there is for them "
            "(host_bytes), or build the schema without entries_apart"
        )
    stays, entries = schema.bytes.block, schema.bytes.entries
    fixed = max_requests * schema.bytes.per_request + other_bytes
    minimum = fixed + needed * stays + min(needed, least_rows) * entries
    if host_bytes < needed * entries:
        raise PoolTooSmall(
            f"{host_bytes:,} bytes of host memory hold the entries of "
            f"{host_bytes // entries:,} blocks of {entries:,} bytes, but one request needs "
            f"{needed} blocks: give at least {needed * entries:,} bytes of host memory, or ask for "
            f"less context",
            minimum_bytes=needed * entries,
        )
    if memory_bytes < minimum:
        raise PoolTooSmall(
            f"{memory_bytes:,} bytes on the device do not hold {max_requests} request slots of "
            f"{schema.bytes.per_request:,} bytes, {other_bytes:,} bytes in addition, {needed} "
            f"blocks of {stays:,} bytes for one request, and the entries of "
            f"{min(needed, least_rows)} blocks of {entries:,}: give at least {minimum:,} bytes, or "
            f"ask for fewer requests, less context or shorter steps",
            minimum_bytes=minimum,
        )
    room = memory_bytes - fixed
    if room >= least_rows * (stays + entries):
        most = (room - least_rows * entries) // stays
    else:
        most = room // (stays + entries)
    blocks, alone = min(most, host_bytes // entries), room // (stays + entries)
    if blocks < alone:
        raise InvalidInput(
            f"{host_bytes:,} bytes of host memory hold the entries of {blocks:,} blocks, but "
            f"without host memory the device holds {alone:,} whole blocks: give more than "
            f"{alone * entries:,} bytes, or none"
        )
    rows = min(blocks, (room - blocks * stays) // entries)
    return BlockBudget(
        num_blocks=blocks,
        max_requests=max_requests,
        block_arena_bytes=blocks * stays,
        slot_arena_bytes=max_requests * schema.bytes.slot,
        block_table_bytes=max_requests * schema.bytes.block_table_row,
        unused_bytes=room - blocks * stays - rows * entries,
        other_bytes=other_bytes,
        entry_rows=rows,
        entries_arena_bytes=rows * entries,
        host_bytes=blocks * entries,
    )


def _resolve_entry(chosen: str | RecordFormat, model: ModelSpec) -> RecordFormat:
    if isinstance(chosen, str):
        return records.entry_format(chosen, head_dim=model.head_dim, rope_dim=model.rope_dim)
    _require_format("entry_format", chosen)
    if chosen.width != model.head_dim:
        raise SchemaError(
            f"record format {chosen.name} holds {chosen.width} channels, {model.name} has "
            f"head_dim={model.head_dim}"
        )
    return chosen


def _resolve_index(chosen: str | RecordFormat, model: ModelSpec) -> RecordFormat:
    if isinstance(chosen, str):
        return records.index_format(chosen, index_dim=model.index_dim)
    _require_format("index_format", chosen)
    if chosen.width != model.index_dim:
        raise SchemaError(
            f"index format {chosen.name} holds {chosen.width} channels, {model.name} has "
            f"index_dim={model.index_dim}"
        )
    return chosen


def _require_format(name: str, chosen: Any) -> None:
    if not isinstance(chosen, RecordFormat):
        raise SchemaError(f"{name} is {chosen!r}: give the name of a format, or a RecordFormat")


def _require_whole_records(*formats: RecordFormat) -> None:
    for each in formats:
        if each.name not in records.WHOLE_FORMATS:
            raise SchemaError(
                f"page_form='records' with {each.name} records: no kernel reads these one by one, "
                f"FlashMLA reads V4's as planes and only V4.1's whole; choose "
                f"{' or '.join(records.WHOLE_FORMATS)} for entries and window, or "
                f"page_form='planes'"
            )


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=int)  # numpy's integers are integers
    return hashlib.sha256(text.encode()).hexdigest()[:32]
