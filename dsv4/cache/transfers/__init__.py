"""Between the device and its tiers: what is cached goes down, what is asked for comes back.

A manager that is built with tiers has one `Transfers`. Nothing else of the cache loads this
package: it needs the extra `dsv4[tiers]`.
"""
