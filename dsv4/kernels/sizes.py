"""How much workspace the kernels need, from shapes alone: the kernels, and the planner, which has
neither a GPU nor torch, ask the same functions. Torch-free."""

from __future__ import annotations

# ---- top-k (kernels/top_k.py says what they are) -------------------------------------------------

BINS = 2048
LIST = 2048
WIDER = 4
LONGER = 2
# Longest row of one program, and longest and shortest slice of longer rows: short slices where
# there are so few rows that processors would stay idle.
MAX_ROW = 8192
MAX_SLICE = 8192
MIN_SLICE = 2048
ENOUGH_PROGRAMS = 256
# From this many rows on, one program does all of a long row.
MANY_ROWS = 256
_SMALLEST_TILE = 256


def top_k_workspace_bytes(rows: int, columns: int, k: int) -> int:
    """What top_k needs as `workspace` for the k highest (or fewer) of such scores."""
    slices = -(-columns // tile_of_row(rows, columns))
    if slices == 1:
        return 0
    return 4 * rows * (2 * LIST if are_many(rows, k) else row_words(slices, k))


def tile_of_row(rows: int, columns: int) -> int:
    """Scores per program, from shapes alone; the result does not depend on it."""
    if columns <= MAX_ROW:
        return max(_SMALLEST_TILE, _power_of_2(columns))
    tile = MIN_SLICE
    while tile < MAX_SLICE and rows * -(-columns // tile) > ENOUGH_PROGRAMS:
        tile *= 2
    return tile


def are_many(rows: int, k: int) -> bool:
    """Whether a program does all of a long row; not where its bins need too many registers."""
    return rows >= MANY_ROWS and bins_and_list(k) == (BINS, LIST)


def padded_slices(slices: int) -> int:
    return max(16, _power_of_2(slices))


def bins_and_list(k: int) -> tuple[int, int]:
    """Bins of a row and the length of its list, if k of its scores are wanted."""
    return (WIDER * BINS, LONGER * LIST) if 2 * k > BINS else (BINS, LIST)


def row_words(slices: int, k: int) -> int:
    """int32 words of the workspace per row, in multiples of 64 bytes."""
    bins, listed = bins_and_list(k)
    return bins + 16 + 2 * padded_slices(slices) + 2 * listed


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# ---- select --------------------------------------------------------------------------------------


def select_bytes(
    rows: int, columns: int, *, top_k: int, score_bytes: int, block_entries: int = 0
) -> int:
    """fp32 scores of `columns` entries, then what their kernel or top-k needs."""
    others = max(score_bytes, _top_k_bytes(rows, columns, top_k, block_entries))
    return aligned(4 * rows * columns) + others


def _top_k_bytes(rows: int, columns: int, top_k: int, block_entries: int) -> int:
    """What the top-k of entries and, after it, that of any number of blocks need."""
    needed = top_k_workspace_bytes(rows, columns, top_k)
    if block_entries:
        blocks = -(-columns // block_entries)
        of_blocks = top_k_workspace_bytes(rows, blocks, blocks)
        needed = max(needed, aligned(4 * rows * blocks) + of_blocks)
    return needed


def aligned(count_bytes: int) -> int:
    return -(-count_bytes // 16) * 16


# ---- attention -----------------------------------------------------------------------------------

# A matrix instruction needs at least this many rows.
MIN_HEADS = 16
MAX_HEADS = 64
# The keys of a query are counted in units; each split has at least UNITS_PER_SPLIT, and more where
# there would be more than MAX_SPLITS. Changing any of these changes the order of sums.
UNIT_KEYS = 64
UNITS_PER_SPLIT = 5
MAX_SPLITS = 16
# Splits that may be in flight, each with a counter.
PLACES = 512


def heads_per_program(heads: int, most: int) -> int:
    return min(most, max(MIN_HEADS, 1 << (heads - 1).bit_length()))


def split_count(window: int, max_entries: int) -> int:
    """How many splits the keys of a query can fall into. `max_entries` is how many entries a query
    can have: the width of `indices`, or the capacity of a row of the block table."""
    return -(-key_units(window, max_entries) // split_units(window, max_entries))


def key_units(window: int, max_entries: int) -> int:
    return -(-window // UNIT_KEYS) - (-max_entries // UNIT_KEYS)


def split_units(window: int, max_entries: int) -> int:
    return max(UNITS_PER_SPLIT, -(-key_units(window, max_entries) // MAX_SPLITS))


def attend_elements(tokens: int, heads: int, head_dim: int, max_splits: int) -> int:
    """fp32 elements that launches of up to `tokens` tokens and `max_splits` splits need.

    They must be 0 before the first launch; consecutive launches may share them, whatever their
    shapes. Where a program has fewer heads there are more programs, but no more elements in all.
    """
    if max_splits <= 1:
        return 0
    block = heads_per_program(heads, MAX_HEADS)
    places = min(tokens * -(-heads // block) * max_splits, PLACES)
    return PLACES + places * block * (head_dim + 2)


# ---- kernels/hopper ------------------------------------------------------------------------------

HEADS_PER_PROGRAM = 64
# A part, for 64 heads: the log2-sum-exp2 in fp32, a power of two in fp32 for each consumer of each
# slice, and the normalised sums of 512 channels in fp16, as multiples of these powers.
POWERS = 8
PART_ELEMENTS = HEADS_PER_PROGRAM * (1 + POWERS + 512 // 2)
# The portable kernel's counters precede the parts; they are used here too, and left at 0.
PARTS_START = PLACES


def hopper_attend_elements(processors: int) -> int:
    """fp32 elements that any launch needs at most: one part per processor, because nothing is split
    when there are more programs than processors."""
    return PARTS_START + processors * PART_ELEMENTS


WIDE_MIN_TOKENS = 64  # tokens of one request from which on the kernel of wide scores is the faster
WIDE_GROUP = 4  # tokens that are loaded together
WIDE_QUERY_BYTES = 64 * 128
# per token: its query, its weights, and its length; fewer heads need less
WIDE_TOKEN_BYTES = WIDE_QUERY_BYTES + 2 * 64 + 4


def wide_score_bytes(tokens: int) -> int:
    """Bytes of the prepared queries; a group that begins with the last token is read as a whole."""
    return (tokens + WIDE_GROUP) * WIDE_TOKEN_BYTES
