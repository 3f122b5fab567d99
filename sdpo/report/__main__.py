"""python -m sdpo.report RUN_DIR [-o report.html]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdpo.report import Selection, write_report


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sdpo.report",
        description="Writes one HTML file, which needs no network: the curves of a run, and every attempt with the "
        "credit of its tokens, its teacher prompt, feedback and demonstration. The run needs log_completions=True.",
    )
    parser.add_argument("run_dir", type=Path, help="output_dir of the run")
    parser.add_argument("-o", "--output", type=Path, help="the page; report.html in the run's folder by default")
    parser.add_argument("--first-step", type=int, default=0, help="leave out the attempts of earlier steps")
    parser.add_argument("--last-step", type=int, default=None, help="leave out the attempts of later steps")
    parser.add_argument(
        "--max-attempts",
        type=int,
        default=20_000,
        help="with more attempts, take whole steps evenly spread over the run (default 20000)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Exit status: 1 where there is no run to show."""
    args = parse(arguments)
    output: Path = args.output or args.run_dir / "report.html"
    selection = Selection(first_step=args.first_step, last_step=args.last_step, max_attempts=args.max_attempts)
    try:
        written = write_report(args.run_dir, output, selection=selection)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = written["bytes"] / 1e6
    print(f"{output}: {written['attempts']} attempts of {written['steps']} steps, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
