"""Runs of several ranks, each run in fresh processes forked from one that has done the imports.

python forked.py FOLDER SUITE RANKS: writes FOLDER/rankN.pt as `ranks.py` does. DeepSpeed has one trainer a process.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import suites
import torch

LIMIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(rank: int, world_size: int, port: int, run: Any, folder: Path) -> int:
    """Process id of a rank, which writes what the run returns or raises."""
    child = os.fork()
    if child:
        return child
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    suites.RANK, suites.WORLD = rank, world_size
    log = os.open(f"{folder}-rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    began = time.monotonic()
    try:
        found = {"value": run(folder)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save({**found, "seconds": time.monotonic() - began}, f"{folder}-rank{rank}.pt")
    os._exit(0)


def main(folder: Path, suite: str, world_size: int) -> None:
    torch.set_num_threads(1)
    if suite == "zero":
        importlib.import_module("deepspeed")  # once, before the forks
    results: list[dict[str, Any]] = [{} for _ in range(world_size)]
    for number, (name, run) in enumerate(suites.SUITES[suite].items()):
        if os.environ.get("ONLY", "") not in name:
            continue
        place, port = folder / f"run{number}", free_port()
        children = [start(rank, world_size, port, run, place) for rank in range(world_size)]
        deadline = time.monotonic() + LIMIT_S
        while children and time.monotonic() < deadline:
            children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
            time.sleep(0.05)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for rank in range(world_size):
            file = Path(f"{place}-rank{rank}.pt")
            lost = {"error": "did not end", "trace": Path(f"{place}-rank{rank}.log").read_text()[-3000:], "seconds": 0}
            results[rank][name] = torch.load(file) if file.exists() else lost
            torch.save(results[rank], folder / f"rank{rank}.pt")
        found = results[0][name]
        print(f"{name}: {found['seconds']:.2f} s {found.get('error', '')[:200]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
