"""Names of the record formats whose values are bf16: those that the Triton kernels take."""

from __future__ import annotations

from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS

BF16_ENTRY_FORMATS = [
    name for name, make in ENTRY_FORMATS.items() if make(128, 64).value_dtype == "bfloat16"
]
BF16_INDEX_FORMATS = [
    name for name, make in INDEX_FORMATS.items() if make(128).value_dtype == "bfloat16"
]
