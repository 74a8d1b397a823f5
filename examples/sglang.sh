#!/bin/sh
# SGLang with a quarter of the free memory and a folder of the user's behind its pools: examples/sglang.sh MODEL [OPTIONS]
# In SGLang's environment, after: pip install .  Variables such as KVARVE_STORAGE change it: docs/sglang.md
set -eu
model=${1:?a model: its folder, or its name on a hub}
shift
KVARVE=1 exec python -m sglang.launch_server --model-path "$model" "$@"
