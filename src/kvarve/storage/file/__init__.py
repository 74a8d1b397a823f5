"""Objects in a few large files below one folder, shared by processes, durable, within a capacity.

Who may call whom, from the top:

    file_storage    `FileStorage`: the calls of a storage; takes the locks
      _slab_allocator  finds a row for an object: free, in a new slab, or evicted; makes and removes slabs
        _idle_models    slabs of models that no process has open
        _eviction_queue  eviction orders
      _index          where each object lies; seizes rows and writes the tables; moves no object
        _change_file    tells processes what others have changed
      _slabs          one slab: a file of equal slots and its table; moves bytes by several threads, and syncs
        _table          the entries of a table, as bytes and arrays
      folder          the folder: its owner, its processes, the mutex, its size
        _processes      which processes have the store open, on which hosts
        _clock          the age of the store
          disk            every system call; tests put a disk that fails in its place
    maintenance     stat, ls, verify, gc for people, on a store that others may have open

Docs: decision 11 (slabs) in docs/decisions; the drawing of the locks in docs/architecture.md.
"""
