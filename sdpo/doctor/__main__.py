"""python -m sdpo.doctor [config.yaml]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sdpo import __version__
from sdpo.doctor import cost, environment, plan


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sdpo.doctor",
        description="Versions, devices and backends of this machine; and for a config file whether the run can start, "
        "and what it costs. Exit status 1 where it cannot start.",
    )
    parser.add_argument(
        "config", type=Path, nargs="?", help="YAML of SDPOConfig and trl.ModelConfig, as --config takes"
    )
    parser.add_argument("--num-processes", type=int, default=1, help="processes of the launch (default 1)")
    parser.add_argument("--num-prompts", type=int, help="rows of the training set, for the counts of an epoch")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Exit status."""
    args, console = parse(arguments), Console()
    show_environment(console)
    if args.config is None:
        return 0
    memory, unknown = None, "The config names no model: add model_name_or_path."
    try:
        found = plan.read_plan(args.config, num_processes=args.num_processes)
        try:
            memory = plan.memory_of(found, num_processes=args.num_processes)
        except OSError as error:
            unknown = str(error)
    except plan.ConfigError as error:
        console.print(f"\n[bold red]{escape(str(args.config))} cannot run.[/] {escape(str(error))}", highlight=False)
        return 1
    console.print(f"\n[bold green]{escape(str(args.config))} can run[/] on {args.num_processes} process(es).")
    show_settings(console, found)
    show_schedule(console, plan.schedule_of(found.config, num_prompts=args.num_prompts))
    if memory is None:
        console.print(f"[yellow]Memory is not known.[/] {escape(unknown)}", highlight=False)
    else:
        show_memory(console, memory, is_on_cpu=found.config.use_cpu)
    return 0


def show_environment(console: Console) -> None:
    """Prints versions, devices and backends."""
    versions = Table(title=f"sdpo {__version__}, Python {sys.version.split()[0]}", title_justify="left")
    for header in ("package", "version", "asked for", ""):
        versions.add_column(header)
    found = environment.packages()
    for package in found:
        note = "" if package.is_in_range else "[red]outside the range[/]"
        versions.add_row(package.name, package.version or "[dim]-[/]", package.wanted, note)
    console.print(versions)
    devices = Table(title="Devices", title_justify="left")
    for header in ("device", "", "memory"):
        devices.add_column(header)
    for device in environment.devices():
        devices.add_row(escape(device.name), device.note, "" if device.memory is None else gigabytes(device.memory))
    console.print(devices)
    with console.status("Trying the backends"):
        tried = environment.backends({package.name: package for package in found})
    backends = Table(title="Backends", title_justify="left")
    for header in ("backend", "works", ""):
        backends.add_column(header)
    for backend in tried:
        backends.add_row(backend.name, "[green]yes[/]" if backend.works else "[yellow]no[/]", escape(backend.reason))
    console.print(backends)


def show_settings(console: Console, found: plan.Plan) -> None:
    """Prints what there is to say of the settings themselves."""
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
    if found.others:
        console.print(f"Left to your script: {escape(', '.join(found.others))}", highlight=False)


def show_schedule(console: Console, found: cost.Schedule) -> None:
    """Prints steps and samples."""
    table = Table(title="Steps and samples, over all processes", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(name: str, value: int | None, unknown: str = "unknown: give --num-prompts") -> None:
        table.add_row(name, f"{value:,}" if value is not None else f"[dim]{unknown}[/]")

    row("prompts a generation (block)", found.prompts_per_block)
    row("completions a generation", found.completions_per_block)
    row("microbatches that use a generation", found.uses_per_block)
    row("completions an optimizer step", found.completions_per_step)
    row("generations an epoch", found.blocks_per_epoch)
    row("optimizer steps an epoch", found.steps_per_epoch)
    row("optimizer steps of the run", found.num_steps, "unknown: set max_steps, or give --num-prompts")
    row("generations of the run", found.num_blocks)
    row("completions of the run", found.num_completions)
    console.print(table)


def show_memory(console: Console, memory: cost.Memory, *, is_on_cpu: bool) -> None:
    """Prints the parts of the memory, and whether a device here has it."""
    table = Table(title="Memory of a process, at the largest sizes allowed, without sharding", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("how it comes about")
    for when, parts in (("", memory.always), ("sampling: ", memory.sampling), ("training: ", memory.training)):
        for part in parts:
            table.add_row(when + part.name, gigabytes(part.size), part.formula)
        table.add_section()
    table.add_row(
        "[bold]peak[/]", f"[bold]{gigabytes(memory.peak)}[/]", "the first group and the larger of the others"
    )
    for name in memory.unknown:
        table.add_row(name, "[dim]unknown[/]", "")
    console.print(table)
    devices = environment.devices()
    sizes = [device.memory for device in (devices[:1] if is_on_cpu else devices[1:]) if device.memory is not None]
    if sizes and memory.peak > min(sizes):
        console.print(
            f"[yellow]That is more than the {gigabytes(min(sizes))} of a device here.[/] Smaller: "
            "per_device_train_batch_size, generation_batch_size, max_completion_length; an adapter (use_peft), "
            "dtype bfloat16, teacher_model_kind 'live', or sharded weights (FSDP, DeepSpeed), which are not counted.",
            highlight=False,
        )


def gigabytes(size: int) -> str:
    """Bytes as a number with a unit."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
