"""sglang.bench_serving, unmodified, once for each list of words in the JSON of the first argument."""

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import sglang_on_cpu

sglang_on_cpu.prepare()

for words in json.loads(sys.argv[1]):
    sys.argv = ["bench_serving", *words]
    runpy.run_module("sglang.bench_serving", run_name="__main__")
