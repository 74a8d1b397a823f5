"""A request's life.

paths          a prompt's place in the tree: what is resident, what a lease pins
prefetch       waiting for storage: probes and fetches
resume         from the claim to ready: the deepest boundary that the device can serve
growth         slots for what is computed, and pages that are published
engine_blocks  the same where an engine owns the device's blocks
"""
