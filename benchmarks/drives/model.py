"""What a stand-in drive delivers."""

from __future__ import annotations

import dataclasses

SMALL = 4096
"""Bytes of the reads that data sheets count per second."""


@dataclasses.dataclass(frozen=True)
class DriveModel:
    """Requests take max(1 / iops, bytes / bytes_per_second) each, one after another, and are
    answered `latency` seconds later."""

    name: str
    iops: float
    bytes_per_second: float
    latency: float

    def rate(self, request_bytes: int) -> float:
        """Requests of this size per second, with enough of them queued."""
        return min(self.iops, self.bytes_per_second / request_bytes)

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds per request and per byte, as `SwarmConfig.device_model`: what fits single reads
        of 4 KiB and long ones."""
        per_byte = 1 / self.bytes_per_second
        return max(1 / self.iops - SMALL * per_byte, 1e-3 * per_byte), per_byte

    def slower(self, factor: float) -> DriveModel:
        """The same drive at 1/`factor` of its rates: what two cores can serve eight of.

        The latency stays, so fewer requests in flight saturate it than the real one.
        """
        return dataclasses.replace(
            self,
            name=f"{self.name} at 1/{factor:g}",
            iops=self.iops / factor,
            bytes_per_second=self.bytes_per_second / factor,
        )

    def dilated(self, factor: float) -> DriveModel:
        """The same drive in slow motion: its rates are 1/`factor`, its latency `factor` times.

        As many requests in flight saturate it as the real one; times divided by `factor` are the
        real drive's, but for what the CPU adds.
        """
        slow = self.slower(factor)
        name = f"{self.name} in 1/{factor:g} slow motion"
        return dataclasses.replace(slow, name=name, latency=self.latency * factor)

    def command(self) -> str:
        """For simulated_ssd.cpp."""
        return f"rate {self.iops!r} {self.bytes_per_second!r} {self.latency * 1e6!r}"


PM9A3 = DriveModel("PM9A3", 1.1e6, 6.9e9, 80e-6)
OPTANE_900P = DriveModel("900P", 0.55e6, 2.5e9, 10e-6)
UNLIMITED = DriveModel("unlimited", 0, 0, 0)
"""The paper's two drives (§8.1): random reads of 4 KiB per second, sequential reads, and the
latency of one read at low load."""


def drive_sets(slowdown: float) -> dict[str, list[DriveModel]]:
    """Sets of the paper's drives at 1/`slowdown` of their rates, by name."""
    fast, slow = PM9A3.slower(slowdown), OPTANE_900P.slower(slowdown)
    return {"4 drives": [fast] * 4, "8 drives": [fast] * 8, "4 + 4 mixed": [fast, slow] * 4}
