"""How many bytes a plan has on the device in addition to the cache: its index tensors and scratch
memory. The manager allocates by these numbers, and the planner, which has no torch, reports
them."""

from __future__ import annotations

from collections.abc import Callable

from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.model import AttentionType, LayerSpec
from dsv4.ops.columns import FOLLOW_COLUMNS, ITEM_COLUMNS, REQUEST_COLUMNS, TOKEN_COLUMNS

# The most bytes of scores that are held at a time, unless one token alone needs more.
SELECT_BYTES = 256 << 20

# bytes that a backend needs to select for a number of tokens in this layer, whose keys are in that
# page; and the size of the candidate blocks that the layer publishes (0: none)
SelectBytes = Callable[[int, LayerSpec, Page, int], int]
# bytes that a backend needs to attend for a number of tokens that read up to this many entries
AttendBytes = Callable[[int, int], int]


# ---- index tensors -------------------------------------------------------------------------------


def ratios_of(schema: CacheSchema) -> list[int]:
    """The ratios whose groups a step may close."""
    return sorted({spec.ratio for spec in schema.model.layers if spec.owns_entries})


def max_items(ratio: int, *, tokens: int, requests: int) -> int:
    """The most groups, and so the most work items, that such a step can touch."""
    return min(tokens, tokens // ratio + 2 * requests)


def most_items(schema: CacheSchema, *, tokens: int, requests: int) -> int:
    """`max_items` of the ratio that has the most; 1 where no layer compresses."""
    found = (max_items(r, tokens=tokens, requests=requests) for r in ratios_of(schema))
    return max(found, default=1)


def max_drafts(schema: CacheSchema) -> int:
    """How many draft steps have index tensors of their own."""
    return schema.max_draft_tokens if schema.draft_layers else 0


def buffer_rows(
    schema: CacheSchema, *, max_requests: int, max_tokens: int
) -> list[tuple[str, int, int]]:
    """Name, rows and columns of a step's int32 tensors, as they lie after each other."""
    # of a step, at most: after a rewind a request's unfinished block may be another one
    new_blocks = 2 * max_requests + max_tokens // schema.block_tokens
    ratios = ratios_of(schema)
    rows: list[tuple[str, int, int]] = [
        ("new_block_at", new_blocks, 2),  # int64 offsets into the block table, first
        ("new_block_id", new_blocks, 1),
        ("batch", max_requests, REQUEST_COLUMNS),
        ("tokens", max_tokens, TOKEN_COLUMNS),
    ]
    if schema.steps_ahead:
        rows.append(("follows", max_requests, FOLLOW_COLUMNS + len(ratios)))
    if drafts := max_drafts(schema):
        rows.append(("draft_batch", drafts * max_requests, REQUEST_COLUMNS))
        rows.append(("draft_tokens", drafts * max_requests, TOKEN_COLUMNS))
    for ratio in ratios:
        items = max_items(ratio, tokens=max_tokens, requests=max_requests)
        rows.append((f"items_{ratio}", items, ITEM_COLUMNS))
    return rows


def padded_words(rows: int, columns: int) -> int:
    return -(-rows * columns // 8) * 8


# ---- scratch memory ------------------------------------------------------------------------------


def staging_rows(schema: CacheSchema, *, max_requests: int, max_tokens: int) -> int:
    """Rows of the page where window rows of a prefill batch stay until a layer has attended."""
    model = schema.model
    return max_tokens + (model.window + model.draft_block - 1) * max_requests


def staging_page(schema: CacheSchema, *, max_requests: int, max_tokens: int) -> Page:
    return Page(
        kind="window",
        layer=-1,
        offset_bytes=0,
        rows=staging_rows(schema, max_requests=max_requests, max_tokens=max_tokens),
        format=schema.window_format,
        form=schema.page_form,  # one kernel writes both pages with one set of strides
    )


def select_workspace(schema: CacheSchema, max_tokens: int, ask: SelectBytes) -> int:
    """For the scores of all tokens of a step, or as many as fit into SELECT_BYTES, at least one."""
    needed = 0
    for spec in schema.model.layers:
        page = schema.layout.page("index_keys", spec.layer)
        if page is not None and spec.has_indexer:
            publishes = spec.layer in schema.model.candidate_sources
            blocks_of = schema.model.candidate_block_entries if publishes else 0
            one, all_tokens = (ask(rows, spec, page, blocks_of) for rows in (1, max_tokens))
            needed = max(needed, one, min(all_tokens, SELECT_BYTES))
    return needed


def attend_workspace(schema: CacheSchema, max_tokens: int, ask: AttendBytes) -> int:
    needed = 0
    for spec in schema.model.layers:
        page = schema.layout.page("entries", spec.layer)
        entries = schema.max_blocks_per_request * page.rows if page is not None else 0
        if spec.attention is AttentionType.CSA:
            entries = min(entries, schema.model.index_topk)
        needed = max(needed, ask(max_tokens, entries))
    return needed


# ---- all of it -----------------------------------------------------------------------------------


def index_bytes(schema: CacheSchema, *, max_requests: int, max_tokens: int) -> int:
    """Two sets of index tensors, which one open plan has on the device and on the host."""
    sizes = buffer_rows(schema, max_requests=max_requests, max_tokens=max_tokens)
    return 2 * 4 * sum(padded_words(rows, columns) for _, rows, columns in sizes)


def plan_bytes(schema: CacheSchema, *, max_requests: int, max_tokens: int) -> int:
    """What one open plan has on the device without the workspaces of select and attend: two sets of
    index tensors, and what groups and windows need."""
    sizes = {"max_requests": max_requests, "max_tokens": max_tokens}
    items = most_items(schema, tokens=max_tokens, requests=max_requests)
    return (
        index_bytes(schema, **sizes)
        + 4 * items * (schema.model.head_dim + 1)
        + schema.bytes.slot
        + staging_page(schema, **sizes).payload_bytes
    )
