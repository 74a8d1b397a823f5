#!/bin/sh
# vLLM with a quarter of the free memory and a folder of the user's behind its blocks: examples/vllm.sh MODEL [OPTIONS]
# In vLLM's environment, after: pip install .  Variables such as KVARVE_STORAGE change it: docs/vllm.md
set -eu
model=${1:?a model: its folder, or its name on a hub}
shift
KVARVE=1 exec vllm serve "$model" "$@"
