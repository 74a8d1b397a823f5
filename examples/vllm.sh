#!/bin/sh
# vLLM with kvarve's host memory and a folder behind its blocks: examples/vllm.sh MODEL [OPTIONS of vllm serve]
# In vLLM's environment, after: pip install .
set -eu
model=${1:?a model: its folder, or its name on a hub}
shift
exec vllm serve "$model" --kv-transfer-config '{
  "kv_connector": "KvarveConnector", "kv_connector_module_path": "kvarve.connectors.vllm.connector",
  "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"host_memory": "4GiB", "storage": "file://?capacity=100GiB"}}' "$@"
