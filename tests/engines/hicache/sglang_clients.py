"""Clients of SGLang, unmodified: for each list in the JSON of the first argument a module and its words, or
MODULE:FUNCTION and its arguments."""

import importlib
import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import sglang_on_cpu

sglang_on_cpu.prepare()

for name, *words in json.loads(sys.argv[1]):
    module, _, function = name.partition(":")
    if function:
        getattr(importlib.import_module(module), function)(**words[0])
        continue
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")
