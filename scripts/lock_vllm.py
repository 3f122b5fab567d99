"""Writes the hashes into tests/vllm_cpu/lock.txt. To change a version, edit its line there and run this (two minutes).

The index is PyPI, whatever this machine is configured to use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tests" / "vllm_cpu" / "lock.txt"
PYTHONS = ("3.11", "3.12", "3.13")  # the hashes are of their wheels for this machine's platform
HEADER = f"""\
# What `make vllm` installs besides torch: Linux x86_64, Python {PYTHONS[0]} to {PYTHONS[-1]}. Torch is not here, as
# its CPU build comes from other indexes with other hashes. A version that differs from constraints.txt is one that
# vLLM asks for. scripts/lock_vllm.py writes the hashes.
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """{normalized name: version} of the lines "name==version"."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE)
    return {normalized(name): version for name, version in found}


def hashes(requirements: dict[str, str], python: str) -> dict[str, str]:
    """{name: sha256} of the wheels that pip would take for a version of Python, from PyPI."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in requirements.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
        command += ["--only-binary=:all:", "--python-version", python, "--target", folder]
        sources = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL")
        environment = {name: value for name, value in os.environ.items() if name not in sources}
        environment["PIP_CONFIG_FILE"] = os.devnull
        subprocess.run([*command, "--report", report, "-r", wanted], env=environment, check=True)
        items = json.loads(report.read_text())["install"]
    return {
        normalized(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in items
    }


def main() -> None:
    requirements, constraints = pins(LOCK), pins(ROOT / "constraints.txt")
    of_package: dict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        for name, sha in hashes(requirements, python).items():
            of_package[name].add(sha)
    lines = [HEADER]
    for name, version in sorted(requirements.items()):
        hashed = "".join(f" \\\n    --hash=sha256:{sha}" for sha in sorted(of_package[name]))
        lines.append(f"{name}=={version}{hashed}\n")
        if constraints.get(name, version) != version:
            print(f"{name}: {version} here, {constraints[name]} in constraints.txt")
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
