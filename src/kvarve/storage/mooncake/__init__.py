"""Objects in a Mooncake Store: the memory of several machines, found through one master.

mooncake_storage    `MooncakeStorage`: the calls of a storage; leases, names per label, what is there and what is lost
client              the client library: one thread per process talks to it, buffers are registered once
mooncake_backend    what a mooncake URL may say
"""
