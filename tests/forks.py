"""Processes of Python that begin where the imports of torch and transformers have ended.

They are forked from one that has made these, since each would need five CPU seconds for them. Whatever else is started
is started as always.

`Popen` and `run` are those of `subprocess`. A program's variables are its own, but what a library reads when it is
imported it has read before.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

PYTESTS = ("", str(Path(__file__).parents[1]))
PRELOADED = [
    "pytest",  # the main module of the process that asks
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "kvarve.reference.server.serve",
    "kvarve.cli.main",
    "forks",
]


def ready() -> None:
    """Start the process that all others are forked from, and wait for its imports."""
    run([sys.executable, "-c", ""])


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`; `python -m NAME`, `-c CODE` and `python FILE` of this interpreter are forked."""

    _process: Any = None

    def _execute_child(self, args: Any, executable: Any, *more: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, Sequence) and not isinstance(args, str) else []
        program, warned = words[:1], words[1:3] == ["-W", "error"]
        words = words[3:] if warned else words[1:]
        if program != [sys.executable] or not (words[0] in ("-m", "-c") or words[0].endswith(".py")):
            super()._execute_child(args, executable, *more)  # type: ignore[misc]
            return
        _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = more
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        files = [DupFd(at if at >= 0 else number) for number, at in enumerate((p2cread, c2pwrite, errwrite))]
        self._process = context.Process(target=_run, args=(words, warned, cwd, dict(env or os.environ), files))
        try:
            self._process.start()
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = self._process.pid
        self._child_created = True

    def _internal_poll(self, *words: Any, **more: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*words, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._process is None:
            return super()._try_wait(flags)  # type: ignore[misc, no-any-return]
        self._process.join(None if not flags else 0)
        code = self._process.exitcode
        return (0, 0) if code is None else (self.pid, code << 8 if code >= 0 else -code)


def run(words: Sequence[Any], **more: Any) -> "subprocess.CompletedProcess[Any]":
    """`subprocess.run`, where what it starts may be forked."""
    capture, timeout = more.pop("capture_output", False), more.pop("timeout", None)
    check, given = more.pop("check", False), more.pop("input", None)
    if capture:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(words, **more) as process:
        try:
            out, err = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _run(words: list[str], warned: bool, cwd: str | None, environment: Mapping[str, str], files: Sequence[Any]) -> None:
    """In the new process."""
    for number, file in enumerate(files):
        os.dup2(given := file.detach(), number)
        os.close(given)
    sys.path[:] = [path for path in sys.path if path not in PYTESTS]  # a program has neither unless it is run there
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if cwd is not None:
        os.chdir(cwd)
    if warned:
        warnings.simplefilter("error")
    # What it starts is forked too; ranks from itself, while one thread runs.
    subprocess.Popen = Popen  # type: ignore[misc]
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  it is known here
    spawn = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: spawn("fork" if method == "spawn" else method)  # type: ignore
    try:
        match words:
            case ["-m", name, *_]:
                sys.argv = words[1:]
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            case ["-c", code, *_]:
                sys.argv = ["-c", *words[2:]]
                sys.path.insert(0, "")
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            case _:
                sys.argv = words
                sys.path.insert(0, str(Path(words[0]).parent))
                runpy.run_path(words[0], run_name="__main__")
    finally:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        atexit._run_exitfuncs()
