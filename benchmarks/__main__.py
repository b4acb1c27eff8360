"""Command line of the benchmarks.

python -m benchmarks list
python -m benchmarks NAME [--quick] [--paths DIR,DIR] [--set name=value] [--json FILE] [--plot FILE]
python -m benchmarks all [--quick] [--paths DIR,DIR] [--out FOLDER]
python -m benchmarks page [--out FOLDER]

`all` runs every benchmark of this machine, each in a process of its own, and writes their results,
pictures and one page to read, RESULTS.md; `page` writes that page anew from results that are there.

The exit status is 0 when a benchmark ran, whether or not its goals hold: a figure is a finding, not
a failure. It is 1 where it cannot run here and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness, page, suite
from benchmarks.registry import BENCHMARKS


def show(result: dict[str, Any], console: Console) -> None:
    """Print a result as tables."""
    measured = Table(title=f"{result['name']}{' (quick)' if result['quick'] else ''}")
    for heading, justify in (("measurement", "left"), ("median", "right"), ("unit", "left")):
        measured.add_column(heading, justify=justify)  # type: ignore[arg-type]
    measured.add_column("spread", justify="right")
    measured.add_column("runs", justify="right")
    for m in result["measurements"]:
        spread = f"{m['spread']:.1%}" if len(m["raw"]) > 1 else ""
        measured.add_row(m["name"], f"{m['median']:.6g}", m["unit"], spread, str(len(m["raw"])))
    console.print(measured)
    if result["checks"]:
        checks = Table(title="goals")
        checks.add_column("goal")
        checks.add_column("value", justify="right")
        checks.add_column("wanted")
        checks.add_column("holds")
        for c in result["checks"]:
            verdict = "[green]yes[/green]" if c["holds"] else "[bold red]NO[/bold red]"
            checks.add_row(c["name"], f"{c['value']:.6g}", c["goal"], verdict)
        console.print(checks)
        missed = [c["name"] for c in result["checks"] if not c["holds"]]
        console.print(
            f"{len(missed)} of {len(result['checks'])} goals do not hold: {', '.join(missed)}"
            if missed
            else f"all {len(result['checks'])} goals hold"
        )
    for note in result["notes"]:
        console.print(f"note: {note}")


def show_list(console: Console) -> None:
    table = Table()
    table.add_column("benchmark")
    table.add_column("what it measures")
    for name, benchmark in BENCHMARKS.items():
        table.add_row(name, benchmark.summary)
    console.print(table)


def arguments_of(given: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Benchmarks of swarm_kv."
    )
    parser.add_argument(
        "name",
        choices=["list", "all", "page", *BENCHMARKS],
        metavar="NAME",
        help="a benchmark, `list`, `all` or `page`",
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller: minutes instead of tens of minutes"
    )
    parser.add_argument(
        "--paths",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="DIR,DIR",
        help="directories on real drives to measure; simulated SSDs if not given",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a parameter; may be repeated",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result here")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw the result here (.png, .svg, .pdf)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help=f"folder of results of `all` and `page` (default: {suite.RESULTS.name}/ here, with "
        "--quick build/benchmarks)",
    )
    return parser, parser.parse_args(given)


def main(arguments: list[str] | None = None) -> int:
    parser, options = arguments_of(arguments)
    console = Console()
    if options.name == "list":
        show_list(console)
        return 0
    folder = options.out or (suite.QUICK_RESULTS if options.quick else suite.RESULTS)
    if options.name == "all":
        done = suite.run(folder, quick=options.quick, paths=options.paths)
        page.write(folder)
        return 0 if done else 1
    if options.name == "page":
        print(page.write(folder))
        return 0

    module = BENCHMARKS[options.name].load()
    quick = module.QUICK if options.quick else {}
    try:
        parameters = harness.override(module.Parameters(**quick), options.set)
    except ValueError as error:
        parser.error(str(error))
    report = harness.Report(options.paths)
    reason = None
    try:
        module.run(parameters, report)
    except (harness.Unavailable, ImportError) as error:
        # What it had measured until then is not reported: nobody knows whether it means anything.
        reason, report = str(error), harness.Report(options.paths)
        print(f"benchmark `{options.name}` cannot run here: {error}", file=sys.stderr)
    result = harness.result_of(
        options.name, parameters, report, quick=options.quick, unavailable=reason
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if reason is not None:
        return 1
    show(result, console)
    if options.plot:
        getattr(module, "plot", harness.plot)(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
