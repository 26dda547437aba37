"""Below the device: host memory, disk, a shared store, object storage.

A tier keeps records (record.py) and answers the same calls as every other tier (tier.py). Nothing
that a tier returns is trusted before its sums are checked, and no tier is indispensable: an outage
is a miss. Torch-free, except for pin.py.
"""
