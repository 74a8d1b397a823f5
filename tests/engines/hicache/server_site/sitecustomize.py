"""Run at the start of each process of SGLang's server, as its folder is in PYTHONPATH."""

import sglang_on_cpu

sglang_on_cpu.prepare_server()
