"""Processes that compute one model together: `agreement` on every input of their cores, over a `star` of sockets."""
