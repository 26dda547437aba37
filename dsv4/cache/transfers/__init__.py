"""Transfers between the device and its tiers: cached blocks go down, requested ones come back.

A manager that is built with tiers has one `Transfers`. Nothing else of the cache loads this
package: it needs the extra `dsv4[tiers]`.
"""
