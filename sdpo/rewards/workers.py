"""Answers judged by a library in processes of their own, many at once, each with limits; see `fork_server`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from sdpo.rewards import sandbox
from sdpo.rewards.sandbox import Level, Limits, num_cores

Problem = Literal["time", "error", "crash", "start"]

_CLOCK_FACTOR = 5  # the limit is of the processor's time, so that a busy machine changes no reward
_lock = threading.Lock()
_servers: dict[tuple[int, str], _Server] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the library said: `value`, or why it said nothing: `problem` with a `detail` for the log."""

    value: Any = None
    problem: Problem | None = None
    detail: str = ""


def judge_all(
    module: str,
    items: Sequence[Any],
    *,
    seconds: int,
    memory: int = 2 << 30,
    level: Level,
    num_workers: int | None = None,
) -> list[Verdict]:
    """The verdicts of `module.judge` on items that JSON can hold, in order.

    `seconds` of the processor's time and `memory` bytes of address space for each; `level`: see `fork_level`.
    `num_workers`: items at once, None for one a core.

    Raises:
        RuntimeError: the processes cannot be started or confined.
    """
    if not items:
        return []
    if level == "restricted":
        sandbox._hide_memory()
    limits = Limits(seconds=seconds, memory=memory)
    paths = [path for path in sys.path if path.rstrip("/").endswith("-packages")]
    specs = [sandbox._confinement(level, limits, paths) for _ in items]
    for spec in specs:
        spec["limits"]["RLIMIT_CPU"] = seconds
    request = {
        "items": list(items),
        "specs": specs,
        "num_workers": num_workers or num_cores(),
        "seconds": seconds * _CLOCK_FACTOR,
    }
    with _lock:
        verdicts = [Verdict(**result) for result in _server(module).ask(request)]
    failed = next((verdict for verdict in verdicts if verdict.problem == "start"), None)
    if failed is not None:
        raise RuntimeError(
            f"a process of level {level!r} could not be confined: {failed.detail or 'it ended at once'}"
        )
    return verdicts


@functools.cache
def fork_level() -> Level | None:
    """The strongest level that a running process can enter: "contained", "restricted"; None where neither works."""
    return next((level for level in sandbox.LEVELS[1:-1] if sandbox._works(level)), None)


class _Server:
    """One `fork_server` of a module. It ends when this process does, since its standard input is closed then."""

    def __init__(self, module: str) -> None:
        if os.name != "posix":
            raise RuntimeError("answers are judged in forks of a process, which only Linux and macOS have")
        names = ("PATH", "LD_LIBRARY_PATH", "HOME")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        # The same packages as here; no thread but one, since threads do not live on in a fork; the same hashes always.
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sdpo.rewards.fork_server", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is the trainer's
        )
        weakref.finalize(self, _close, self.process)
        self._read()

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: list[dict[str, Any]] = json.loads(self._read())
        return answer

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"the process that judges answers ended with exit code {code}; it wrote why to the log")
        return line


def _server(module: str) -> _Server:
    # A fork of this process has the parent's pipes, which it must leave alone.
    key = (os.getpid(), module)
    if key not in _servers or _servers[key].process.poll() is not None:
        _servers[key] = _Server(module)
    return _servers[key]


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
        return
    process.kill()
    process.wait()
