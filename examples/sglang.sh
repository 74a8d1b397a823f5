#!/bin/sh
# SGLang's HiCache with a folder of kvarve as its storage: examples/sglang.sh MODEL [OPTIONS of sglang.launch_server]
# In SGLang's environment, after: pip install .
set -eu
model=${1:?a model: its folder, or its name on a hub}
shift
exec python -m sglang.launch_server --model-path "$model" --enable-hierarchical-cache \
  --hicache-mem-layout page_first_direct --hicache-io-backend direct --hicache-storage-backend dynamic \
  --hicache-storage-backend-extra-config '{"backend_name": "kvarve", "class_name": "HiCacheKvarve",
    "module_path": "kvarve.connectors.sglang.hicache_storage", "interface_v1": 1, "storage": "file://?capacity=100GiB"}' "$@"
