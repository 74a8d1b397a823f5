"""Two ranks on one GPU: each is a node of its own, since nccl has one rank of a node on a GPU."""

import os
import socket


def environment(node: int) -> dict[str, str]:
    """Of a node's processes: what names it for nccl, which then goes by sockets of this machine."""
    return {**os.environ, "NCCL_HOSTID": f"node {node}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def address() -> str:
    """Where they meet: nobody listens there, nor at the next port."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return f"127.0.0.1:{port}"
