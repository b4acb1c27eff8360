"""Whether GPUDirect Storage works on the drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness import Report
from swarm_kv import doctor
from swarm_kv.demo import drive_paths

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters


def run(parameters: Parameters, report: Report) -> None:
    with drive_paths(report.paths, 1) as paths:
        obstacles = [doctor.gpu_direct_obstacle(path) for path in paths]
    works = [not obstacle for obstacle in obstacles]
    report.measure("storage: GPUDirect Storage works", "of the drives", sum(works) / len(works))
    for obstacle in filter(None, obstacles):
        report.note(f"GPUDirect Storage does not work: {obstacle}")
