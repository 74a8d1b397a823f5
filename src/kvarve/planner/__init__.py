"""What does memory buy? Replays a trace of prompts through the product's own core, without a model or a byte of KV.

traces.py              what requests there were: three formats of files, read into one
simulation_config.py   the model as bytes, the memory, the speeds and the replicas
replayer.py            requests go through cores; copies and computing take the time that the speeds say, or none
routing.py             which replica gets a request
sweep.py               the miss ratio of every eviction order at many sizes, beside that of the best of all caches
simulate_command.py    `kvarve simulate`
"""

from kvarve.planner.replayer import SimulationReport, replay, replayed
from kvarve.planner.simulate_command import main
from kvarve.planner.simulation_config import SimulationConfig
from kvarve.planner.traces import TraceRequest, read_trace

__all__ = ["SimulationConfig", "SimulationReport", "TraceRequest", "main", "read_trace", "replay", "replayed"]
