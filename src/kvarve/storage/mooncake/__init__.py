"""Objects in a Mooncake Store: the memory of several machines, found through one master.

_mooncake_storage   `MooncakeStorage`: the calls of a storage; leases, names per label, what is there and what is lost
_client             the client library: one thread per process talks to it, buffers are registered once
_mooncake_backend   what a mooncake URL may say
"""
