"""The tests of the CUDA operators: each against its CPU twin, opcheck, graphs, bad input."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from benchmarks.harness import ROOT, Report

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters


def run(parameters: Parameters, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "tests.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", parameters.tests, "-q"),
                *("-p", "no:cacheprovider", f"--junitxml={found}"),
            ],
            cwd=ROOT,
            check=False,
        )
        cases = list(ElementTree.parse(found).iter("testcase"))
    results = {case: {child.tag for child in case} for case in cases}
    failed = [case for case, tags in results.items() if tags & {"failure", "error"}]
    skipped = [case for case, tags in results.items() if "skipped" in tags]
    report.measure("tests: passed", "tests", len(cases) - len(failed) - len(skipped))
    report.measure("tests: skipped", "tests", len(skipped))
    report.at_most("tests: failed", len(failed), 0)
    for case in failed:
        child = next(child for child in case if child.tag in ("failure", "error"))
        message = " ".join((child.get("message") or "").split())
        report.note(f"failed: {case.get('name')}: {message[:300]}")
