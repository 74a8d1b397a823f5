"""Clients of SGLang, unmodified: for each list in the JSON of the first argument a module and its words."""

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import sglang_on_cpu

sglang_on_cpu.prepare()

for module, *words in json.loads(sys.argv[1]):
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")
