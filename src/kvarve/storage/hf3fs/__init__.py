"""Objects in slots of large files on 3FS, DeepSeek's distributed file system, and which slot holds which object.

Who may call whom, from the top:

    hf3fs_backend what a hf3fs URL may say
    hf3fs_storage `Hf3fsStorage`: the calls of a storage; asks the metadata for slots, the engine for their bytes
      slot_layout a slot as it lies in a file: its header, its place, and whether both name the object that is wanted
      io_engine   moves bytes between buffers and files: POSIX calls, or USRBIO, which copies nothing
      metadata    which slot holds which object: one service for all processes of a cluster

Whatever the metadata says, what is read is compared with the header of its slot: trouble there costs misses.
"""
