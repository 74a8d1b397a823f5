#!/usr/bin/env bash
# What a GPU measures and proves, in two runs of at most 270 s each:
#
#   benchmarks/card.sh 1 [BUS.py]    the data path: versions, what the bus carries, the lanes, their tests, memcheck
#   benchmarks/card.sh 2             the engine: its tests on a GPU, the proof, time to the first token
#
# BUS.py: a script that times the bus, called with --seconds and --json (without a GPU with --dry-run). PYTHON chooses the
# Python, by default .venv's. Results go to $OUT, by default benchmarks/results/CARD-DATE: each part's output, the figures
# of benchmarks, and `summary`. The exit code is the number of parts that failed. Without a GPU the same parts run in their
# quick form, as a rehearsal, into out/card; its figures mean nothing.
set -uo pipefail
case ${1:-} in 1 | 2) ;; *) sed -n '2,11s/^# \{0,1\}//p' "$0" && exit 64 ;; esac
run=$1 bus=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.." || exit 64
python=${PYTHON:-.venv/bin/python}
command -v "$python" > /dev/null || python=python3
export PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
card=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 64
if [ -n "$card" ]; then
  out=${OUT:-benchmarks/results/${card//[ \/]/-}-$(date +%F)} device=cuda:0 quick='' large='--model large' left=270
else
  out=${OUT:-out/card} device=cpu quick=--quick large='' left=2700
fi
mkdir -p "$out" || exit 64
# Where kvarve is not installed: its version and its storages are read from what setuptools writes beside the source.
"$python" -c 'import importlib.metadata; importlib.metadata.version("kvarve")' 2> /dev/null ||
  "$python" -c 'import setuptools; setuptools.setup()' -q egg_info || exit 64
pytest=("$python" -m pytest -q -p no:cacheprovider -m "not (long)")  # so written, costs are not judged
failed=0

# part NAME SECONDS COMMAND...: run one part, for at most so long (a rehearsal: ten times that) and no longer than the run.
part() {
  local name=$1 most=$2 began=$SECONDS code
  [ -n "$card" ] || most=$((10 * most))
  most=$((most < left ? most : left))
  shift 2
  echo "== $run $name, at most $most s"
  [ "$most" -gt 0 ] && timeout -k 5 "$most" "$@" 2>&1 | tee "$out/$name.txt"
  code=$?
  left=$((left - SECONDS + began))
  [ $code -eq 0 ] || failed=$((failed + 1))
  echo "$run $name: code $code, $((SECONDS - began)) s" >> "$out/summary"
}

if [ "$run" = 1 ]; then
  rm -f "$out/summary"
  part versions 10 bash -c "git rev-parse HEAD; $python -VV; $python -m pip list 2> /dev/null |
    grep -iE '^(torch|triton|cuda-|transformers|numpy|xxhash) '; [ -z '$card' ] || { nvidia-smi -L; nvidia-smi -q |
    grep -iE 'driver version|cuda version|link gen|link width|current  |max  '; }"
  if [ -n "$bus" ]; then
    [ -n "$card" ] && how="--seconds 70" || { how=--dry-run; export TRITON_INTERPRET=1; }
    part bus 80 "$python" "$bus" --json "$out/bus.json" $how
  fi
  part lanes 60 "$python" benchmarks/lanes.py --device $device --json "$out/lanes.json" $quick
  part memory 60 "${pytest[@]}" tests/memory
  if [ -n "$card" ] && command -v compute-sanitizer > /dev/null; then  # torch's own allocator would hide a page's end
    part memcheck 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
      "${pytest[@]}" tests/memory/test_gpu_copies.py
  fi
else
  part engine 70 "${pytest[@]}" tests/engine/test_gpu_ranks.py tests/engine/test_shared_memory.py -k 'gpu or cuda or ranks'
  part ranks 50 "${pytest[@]}" tests/engine/test_ranks.py tests/server/test_several_ranks.py -k gpu
  part verify 70 "$python" -m kvarve verify --device ${device%:0} --json "$out/verify.json" $quick
  part prefixes 80 "$python" benchmarks/prefixes.py --device $device --json "$out/prefixes.json" $quick $large
fi
echo "== $out"
cat "$out/summary"
exit $failed
