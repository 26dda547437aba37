"""Numbers that both backends compute with. Torch-free."""

from __future__ import annotations

BF16_MAX = 3.3895313892515355e38
BF16_NAN_BITS = 0x7FC0

# exp(x) = 2^n · e^r, r = x - n·ln 2 in two parts; the first has 9 bits, so n·LN2_HIGH is exact
LOG2_E = 1.4426950216293335
LN2_HIGH = 0.693359375
LN2_LOW = -2.1219444170128554e-4
EXP_POLY = (
    1.9875691214110702e-4,
    1.398199936375022e-3,
    8.333452045917511e-3,
    4.1665792465209961e-2,
    1.6666665673255920e-1,
    5.0000000e-1,
)
EXP_UNDERFLOW = -87.0
ROUND_MAGIC = 12582912.0  # 1.5 · 2^23: adding and subtracting it rounds to the nearest integer

SUM_LANES = 32  # rows of a group are summed in this many lanes, then the lanes as a tree
PROJECTION_LANES = 16  # likewise for the channels of a latent, which are projected
MIN_HEADS = 16  # sums over heads pad them to a power of two, to at least this
