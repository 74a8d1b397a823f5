"""Runs the metadata server of a store, where it is not the first client that starts it: under systemd, say.

    python -m kvarve.storage.hf3fs.metadata FOLDER [--idle-s SECONDS]

FOLDER is the server's own. Clients are told where it is: metadata=unix:FOLDER/socket.
"""

import argparse
import sys
from math import inf
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.hf3fs.metadata.metadata_server import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvarve.storage.hf3fs.metadata", allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--idle-s", type=float, default=inf, help="end after so long without a connection")
    parser.add_argument("--detach", action="store_true", help="return when it listens")
    args = parser.parse_args()
    try:
        serve(args.folder, args.idle_s, detach=args.detach)
    except StorageError as error:
        print(f"kvarve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
