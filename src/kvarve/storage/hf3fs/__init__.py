"""Objects in slots of large files on 3FS, DeepSeek's distributed file system. Each process gives the slots of its own
files, and a map says which slot has which object.

Who may call whom, from the top:

    _hf3fs_backend what a hf3fs URL may say
    _hf3fs_storage `Hf3fsStorage`: the calls of a storage; asks an owner for slots, the engine for their bytes
      _owner       what this process has of a store, in a `_slot_table`, and what it tells the map (`_redis_map`)
      _io_engine   moves bytes between buffers and files by POSIX calls; `_io_usrbio` by rings, and copies nothing
      _slot_layout a slot as it lies in a file: its header, its place, and whether both name the object that is wanted

Whatever the map says, what is read is compared with the header of its slot: trouble there costs misses.
"""
