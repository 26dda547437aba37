"""Below the device: host memory, disk, a shared store, object storage.

A tier keeps records (record.py) and answers the same calls as every other tier (tier.py). Nothing
that a tier hands back is believed before its sums are checked, and no tier is needed: an outage is
a miss. Torch-free, but for pin.py.
"""
