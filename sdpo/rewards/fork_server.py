"""A process that lets a library judge answers, each in a fork of its own. Standard library only, but for that library.

Started with `python -m`, it imports the library once; lines of JSON come in and go out. A fork starts in milliseconds
with all that is imported. Then it gives up what it does not need and reads the answer. It can be ended, which a thread
cannot, whatever the answer makes the library compute, and what the answer breaks breaks with it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sdpo.rewards import sandbox_child

_RESULT_BYTES = 1 << 16


@dataclass
class _Fork:
    """One answer that is being judged."""

    index: int
    pid: int
    pipe: int
    deadline: float
    processor_seconds: float
    data: bytearray = field(default_factory=bytearray)


def main() -> None:
    module = import_module(sys.argv[1])
    module.warm_up()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page that is shared
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print("ready", file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(judge_all(module.judge, **json.loads(line))), file=channel, flush=True)


def judge_all(
    judge: Callable[[Any], Any], items: list[Any], specs: list[dict[str, Any]], *, num_workers: int, seconds: float
) -> list[dict[str, Any]]:
    """One result an item, in order: `{"value": what judge returned}` or `{"problem": ..., "detail": ...}`.

    Problems: "time" (the limit on the processor's time or `seconds` on the clock), "error" (judge raised), "crash",
    and "start" where a fork could not give up what its spec says.
    """
    results: list[dict[str, Any]] = [{} for _ in items]
    waiting = list(range(len(items)))[::-1]
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < num_workers:
                index = waiting.pop()
                fork = _start(judge, items[index], specs[index], index, time.monotonic() + seconds)
                selector.register(fork.pipe, selectors.EVENT_READ, fork)
            readable = {key.fd for key, _ in selector.select(0.05)}
            for key in list(selector.get_map().values()):
                fork = key.data
                is_over = time.monotonic() > fork.deadline or len(fork.data) > _RESULT_BYTES
                if key.fd in readable:
                    chunk = os.read(key.fd, _RESULT_BYTES)
                    fork.data += chunk
                    is_over = is_over or not chunk
                if is_over:
                    selector.unregister(key.fd)
                    results[fork.index] = _end(fork)
    return results


def _start(judge: Callable[[Any], Any], item: Any, spec: dict[str, Any], index: int, deadline: float) -> _Fork:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Fork(index, pid, read, deadline, spec["limits"]["RLIMIT_CPU"])
    try:
        os.setsid()
        # Nothing of the server's is left open: neither its requests nor what other forks answer.
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(write, 3)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        os.closerange(4, 4096)
        _answer(judge, item, spec)
    finally:
        os._exit(0)


def _answer(judge: Callable[[Any], Any], item: Any, spec: dict[str, Any]) -> None:
    try:
        sandbox_child._confine(spec)
    except OSError as error:
        os.write(3, str(error).encode())
        return
    os.write(3, sandbox_child.READY)
    try:
        result = {"value": judge(item)}
    except Exception as error:
        result = {"problem": "error", "detail": f"{type(error).__name__}: {error}"[:500]}
    os.write(3, json.dumps(result).encode())


def _end(fork: _Fork) -> dict[str, Any]:
    """The result of a fork, of which nothing is left."""
    is_late = time.monotonic() > fork.deadline
    os.close(fork.pipe)
    with suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)
    _, status, usage = os.wait4(fork.pid, 0)
    # The system counts in ticks, so that a process which it ended at the limit can seem to have used a little less.
    is_late = is_late or usage.ru_utime + usage.ru_stime > 0.9 * fork.processor_seconds
    if not fork.data.startswith(sandbox_child.READY):
        return {"problem": "start", "detail": fork.data.decode(errors="replace")}
    is_whole = len(fork.data) <= _RESULT_BYTES
    with suppress(ValueError, RecursionError):
        found = json.loads(fork.data[len(sandbox_child.READY) :])
        json.dumps(found)  # what is nested so deep that it cannot be passed on is no result either
        if is_whole and isinstance(found, dict) and found.keys() in ({"value"}, {"problem", "detail"}):
            return {"problem": "error", "detail": str(found["detail"])} if "detail" in found else found
    return {"problem": "time" if is_late else "crash", "detail": f"exit code {os.waitstatus_to_exitcode(status)}"}


if __name__ == "__main__":
    main()
