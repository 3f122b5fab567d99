"""Pages of docs/ that are written by a script: written, or compared with what is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_or_check(name: str, text: str, *, script: str, description: str | None) -> int:
    """Exit status. With --check nothing is written, and it is 1 where the page is stale."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is stale")
    path = DOCS / name
    if not parser.parse_args().check:
        path.write_text(text, encoding="utf-8")
        return 0
    is_fresh = path.exists() and path.read_text(encoding="utf-8") == text
    if not is_fresh:
        print(f"{name} is stale: run {script}", file=sys.stderr)
    return 0 if is_fresh else 1
