"""The product: `scheduler` decides, `worker` moves bytes, `prefix_cache` is both in one process.

What the two say to one another is in `messages`; `attach` changes their storage while they run; `config` sizes memory.
"""
