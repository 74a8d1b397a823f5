"""vLLM engines in processes of their own, asked in lines of JSON. Nothing of vLLM is imported here: `vllm_engine` runs
by the Python that has it.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvarve.errors import ConfigError, KvarveError

VARIABLE = "KVARVE_VLLM_PYTHON"
_CHECKOUT = Path(__file__).parents[3]  # or whatever kvarve is installed in
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_NEEDED = ("vllm", "kvarve", "xxhash")
_ASK = f"from importlib.util import find_spec; print('lacks', *(it for it in {_NEEDED} if not find_spec(it)))"


def python_with_vllm(given: Path | None) -> Path:
    """The Python to run engines by: `given`, this one, or that of .venv-vllm beside kvarve's source.

    ConfigError: there is none, or it lacks vLLM or kvarve; the message says how to get it.
    """
    own = _CHECKOUT / ".venv-vllm" / "bin" / "python"
    if given is not None:
        python = given
    elif importlib.util.find_spec("vllm") is not None:
        python = Path(sys.executable)
    elif own.exists():
        python = own
    else:
        raise ConfigError(
            "vLLM must be installed: `make run-vllm` in kvarve's checkout sets one up; or name the Python of an "
            f"environment that has vLLM and kvarve (`pip install .` there) with --engine-python or ${VARIABLE}"
        )
    try:
        why, words = "", [str(python), "-P", "-c", _ASK]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        lacks, *missing = done.stdout.split() or [""]
    except (OSError, subprocess.SubprocessError) as e:
        lacks, why = "", getattr(e, "strerror", "")
    if lacks != "lacks":
        raise ConfigError(f"--engine-python: {python}: {why or 'this is no Python 3.11 or newer'}")
    if missing:
        how = "install vLLM there, or name another Python" if "vllm" in missing else f"{python} -m pip install ."
        where = "" if "vllm" in missing else " in kvarve's checkout"
        raise ConfigError(f"--engine-python: {python} needs {missing[0]}: {how}{where}")
    return python


class EngineProcess:
    """One engine, which starts in the background until the first call; `with` ends it. KvarveError: it has ended by
    itself, and its log says why."""

    def __init__(self, python: Path, settings: dict[str, Any], log: Path, module: str = f"{__package__}.vllm_engine"):
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        self._log, self._ready = log, False
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), "-P", "-m", module, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | _SETTINGS | {"OMP_NUM_THREADS": threads},
                text=True,
            )

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.call("end")
        finally:
            self._kill()

    def ready(self) -> None:
        """Wait until it has started."""
        if not self._ready:
            self._ready = bool(self._read()["ready"])

    def call(self, name: str, **more: Any) -> Any:
        self.ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` says why
            print(json.dumps({"do": name} | more), file=self._process.stdin, flush=True)
        return self._read()["answer"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            said = next((one for one in reversed(lines) if "Error" in one), (lines or ["its log is empty"])[-1])
            raise KvarveError(f"vLLM has ended: {said.strip()} (all of it is in {self._log})")
        return json.loads(line)

    def _kill(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait(60)
        self._process.stdin.close()
        self._process.stdout.close()
