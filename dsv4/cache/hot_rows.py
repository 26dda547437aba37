"""The device memory that a request needs in addition to its blocks and its slot where entries may
live in host memory: the records that its selections fetch, and the tables that say where they lie.
Torch-free.

    entries arena   hot rows of slot s: `arena_rows` rows, the same for all layers
    per layer       place int16 [entries], entry_of and used int32 [records], clock and hand int32

Only layers that own entries which are kept apart have hot rows; layers that read another layer's
entries share its hot rows.
"""

from __future__ import annotations

from functools import cached_property

from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, require_count

MOST_RECORDS = 32_767  # `place` is int16
_PLACE_BYTES = 2
_RECORD_BYTES = 4 + 4  # entry_of, used
_LAYER_BYTES = 4 + 4  # clock, hand
_TABLE_BYTES = 4


class HotLayout:
    """Sizes of the hot rows of one slot that give every layer at least `hot_rows` records
    (default: four selections of a step, 2,048 for V4-Flash without drafts).

    A row of the entries arena has the entries of one block, of all layers, so a layer with more
    entries in a block has more hot records. Raises InvalidInput if a layer could not keep all
    entries that a step selects, or has more records than int16 can number.
    """

    def __init__(self, schema: CacheSchema, hot_rows: int | None = None) -> None:
        if not schema.bytes.entries:
            why = "no layer of it selects entries"
            if not schema.entries_apart:
                why = "build the schema with entries_apart=True"
            raise InvalidInput(f"{schema.model.name} keeps no entries apart from its blocks: {why}")
        self.schema = schema
        self.needed_entries = schema.model.index_topk * schema.max_decode_tokens
        self.hot_rows = (
            self._default_entries() if hot_rows is None else require_count("hot_rows", hot_rows)
        )
        if self.hot_rows < self.needed_entries:
            raise InvalidInput(
                f"hot_rows={self.hot_rows:,}: a step of up to {schema.max_decode_tokens} "
                f"tokens selects {self.needed_entries:,} entries of a request, and all of them are "
                f"on the device at once: give at least as many"
            )
        most = max(self.records(page) for page in self.pages)
        if most > MOST_RECORDS:
            raise InvalidInput(
                f"hot_rows={self.hot_rows:,} makes {most:,} hot records in one layer, of "
                f"which {MOST_RECORDS:,} can be numbered: ask for fewer"
            )

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        """Of the layers that own entries which are kept apart."""
        schema = self.schema
        found = (
            schema.layout.page("entries", spec.layer)
            for spec in schema.model.layers
            if spec.owns_entries
        )
        return tuple(page for page in found if page is not None and page.apart)

    def _default_entries(self) -> int:
        """Four times what a step selects, as far as int16 numbers the records of every layer."""
        fewest, most = min(page.rows for page in self.pages), max(page.rows for page in self.pages)
        return max(self.needed_entries, min(4 * self.needed_entries, MOST_RECORDS // most * fewest))

    @cached_property
    def arena_rows(self) -> int:
        """Rows of the entries arena that a slot has."""
        return -(-self.hot_rows // min(page.rows for page in self.pages))

    def records(self, page: Page) -> int:
        """Hot records of a slot in one layer."""
        return self.arena_rows * page.rows

    def entries(self, page: Page) -> int:
        """Entries of a request in one layer, at most."""
        return self.schema.max_blocks_per_request * page.rows

    @property
    def hot_bytes(self) -> int:
        """A slot's rows of the entries arena."""
        return self.arena_rows * self.schema.bytes.entries

    @property
    def table_bytes(self) -> int:
        """What says of a slot where entries lie: the tables of each layer, and the row of the table
        that maps blocks to rows of the entries arena."""
        layers = sum(
            _PLACE_BYTES * self.entries(page) + _RECORD_BYTES * self.records(page) + _LAYER_BYTES
            for page in self.pages
        )
        return layers + _TABLE_BYTES * self.schema.max_blocks_per_request

    @property
    def slot_bytes(self) -> int:
        """What a live request needs in addition to what it needs with all entries on the device."""
        return self.hot_bytes + self.table_bytes

    @property
    def open_rows(self) -> int:
        """Rows of the entries arena for the blocks that a decode step may still write: these stay
        on the device."""
        schema = self.schema
        reach = schema.max_rollback_tokens
        return min(1 + -(-reach // schema.block_tokens), schema.max_blocks_per_request)

    @property
    def staged_bytes(self) -> int:
        """Entries of one request in one layer: what a chunk reads at once, at most."""
        return max(self.schema.max_blocks_per_request * page.payload_bytes for page in self.pages)
