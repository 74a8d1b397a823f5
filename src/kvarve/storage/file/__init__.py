"""Objects in a few large files below one folder, shared by processes, durable, within a capacity.

Who may call whom, from the top:

    storage         `FileStorage`: the calls of a storage; takes the locks
      mover           moves bytes between memory and slots on several threads, and syncs
      slab_allocator  makes a slab, removes one, finds the one that is worth least
        idle_models     slabs of models that no process has open
      index           where each object lies, which is evicted next; seizes rows and writes the tables; moves no object
        call            what a put may do and needs next
        orders          eviction orders
        changes         tells processes what others have changed
      slabs           one slab: a file of equal slots and its table
        table           the entries of a table, as bytes and arrays
      folder          the folder: its owner, its processes, the mutex, its size
        processes       which processes have the store open, on which hosts
        clock           the age of the store
          disk            every system call; tests put a disk that fails in its place
    maintenance     stat, ls, verify, gc for people, on a store that others may have open

Docs: decision 11 (slabs) in docs/decisions; the drawing of the locks in docs/architecture.md.
"""
