"""All runs of one rank of several, one after the other, started by torchrun: python ranks.py FOLDER SUITE.

Writes what they leave to FOLDER/rankN.pt: by name, {"value": ..., "seconds": ...} or {"error": ..., "seconds": ...}.
They are written after each run; one that takes too long ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import suites
import torch

LIMIT_S = 60


def main(folder: Path, suite: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}

    def give_up(*_: Any) -> None:
        faulthandler.dump_traceback()
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    runs: dict[str, Callable[[Path], Any]] = suites.SUITES[suite]
    chosen = os.environ.get("ONLY", "")
    for number, (name, run) in enumerate(runs.items()):
        if chosen not in name:
            continue
        began = time.monotonic()
        signal.alarm(LIMIT_S)
        try:
            found = {"value": run(folder / f"run{number}")}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        signal.alarm(0)
        results[name] = {**found, "seconds": time.monotonic() - began}
        torch.save(results, folder / f"rank{rank}.pt")
        print(f"rank {rank}, {name}: {results[name]['seconds']:.2f} s {found.get('error', '')[:200]}", flush=True)
    print(f"rank {rank}: {time.process_time():.0f} s of the processor", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
