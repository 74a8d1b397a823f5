"""The decisions of a cache, pure: which pages are where, who holds them, what is copied next.

`core.Core` is put together from the parts in these folders.

    tree      prompts as runs of pages, and what has left the tree
    slots     which page is in which slot; who may be evicted for whom, in which order
    copies    what is copied down when, what is in flight, what holds copies back
    requests  a request's life: its path in the tree, waiting for storage, resuming, growing
    observe   what people see; nothing is decided there

Where a prompt may resume is decided by `pages.boundaries`.
"""
