"""Bytes between tiers: `transfer_engine` copies between memory tiers, `lanes` take pages to and from a storage.

`storage_road` is the road of one call: its threads, deadline, buffers and breaker.
"""
