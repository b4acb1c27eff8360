"""The peers, in two parts, each one table.

`models`: tokens per second, bytes read, memory and exactness, on the same drives, model and text.
`stores`: how fast random extents are read back from files on the same drives.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.drives import PM9A3, checked_drives
from benchmarks.drives.filesystem import file_systems
from benchmarks.harness import Report, Unavailable
from benchmarks.peers import models as decoding
from benchmarks.peers import stores
from benchmarks.peers.registry import PEERS, REFERENCE, SWARM, SWARM_EXACT
from swarm_kv import models, texts
from swarm_kv.cache import kv_bytes

REMARK = (
    "all decode the same tokens of the same text, in turn, in environments of their own "
    "(`scripts/setup.sh peers`), with an ext4 on each drive. Files per layer go to the drives in "
    "turn but are read one after another, so that one drive works at a time; oLLM and LMCache know "
    "one directory. Rows with a warm page cache hold the whole KV in memory, which the memory "
    "column does not count. kvpress drops entries for good and uses no drives. transformers' "
    "offloaded cache needs a CUDA device. Of oLLM only its cache runs here, with the model in "
    "memory; its other requirements compile CUDA kernels."
)
STORE_DRIVE_BYTES = 512 << 20
CHECKED = (64 << 10,)
EXACT = 1e-3
"""Largest difference of a logit that float32 in another order makes; logits are about 10."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    parts: tuple[str, ...] = ("models", "stores")
    peers: tuple[str, ...] = ()
    """Rows of the table by their names, see registry.py; all if empty."""
    model: str = "smollm2"
    source: str = "topics"
    """Text, see `swarm_kv.texts`."""
    context: int = 4096
    repeats: int = 2
    steps: int = 4
    """Tokens per repetition."""
    compared: int = 48
    """Tokens over which lossy peers are compared with full attention."""
    dram_share: float = 0.25
    """Memory of swarm_kv as a share of the context's KV."""
    drives: int = 4
    slowdown: float = 50.0
    """How much slower than a PM9A3 each drive is."""
    sizes: tuple[int, ...] = (64 << 10, 1 << 20)
    """Of extents, in bytes."""
    seconds: float = 0.5
    """That a store reads in each repetition."""


QUICK: dict[str, Any] = {
    "peers": (SWARM, "torch.save per layer", "kvpress SnapKV keeping 0.1"),
    "context": 1024,
    "dram_share": 0.5,  # the window alone is a quarter
    "repeats": 1,
    "steps": 2,
    "compared": 8,
    "sizes": (64 << 10,),
    "seconds": 0.2,
}


def run(parameters: Parameters, report: Report) -> None:
    for name in parameters.parts:
        PARTS[name](parameters, report)


def run_models(parameters: Parameters, report: Report) -> None:
    from transformers import AutoConfig, AutoTokenizer

    unknown = set(parameters.peers) - set(PEERS)
    if unknown:
        raise Unavailable(f"no peers {sorted(unknown)}; there are {', '.join(PEERS)}")
    chosen = {
        name: peer
        for name, peer in PEERS.items()
        if not parameters.peers or name in (*parameters.peers, REFERENCE)
    }
    folder = models.converted(parameters.model)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    length = (parameters.context, parameters.repeats, parameters.steps, parameters.compared)
    ids = texts.token_ids(tokenizer, decoding.Task.tokens(*length), parameters.source)
    size = kv_bytes(config, models.torch.float32, parameters.context)
    model = PM9A3.slower(parameters.slowdown)
    with (
        checked_drives(
            [model] * parameters.drives, 2 * size + (256 << 20), report, checked=CHECKED
        ) as drives,
        file_systems(drives) as folders,
    ):
        task = decoding.Task(
            folder,
            ids[0].tolist(),
            *length,
            folders,
            parameters.dram_share,
        )
        rows = decoding.run(task, chosen, config.vocab_size)
    decoding.report_rows(rows, report)
    for name, row in rows.items():
        if row.peer.exact and name != REFERENCE and not row.reason:
            report.at_most(f"{name}: max |logit - full|", row.difference, EXACT)
    _compare_with_files(rows, report)
    Console(stderr=True, width=200).print(decoding.table(rows))
    report.note("each peer has an ext4 on each drive")
    report.note(
        f"{parameters.model}, float32, {parameters.context} tokens of context "
        f"({decoding.mib(size)} of KV), batch 1, teacher-forced; memory of swarm_kv: "
        f"{parameters.dram_share:g} of that; memory is growth of the process since the model was "
        "loaded, without the page cache, which holds the files of the rows `page cache warm`; "
        "kvpress in float32 with transformers of its own"
    )


def run_stores(parameters: Parameters, report: Report) -> None:
    model = PM9A3.slower(parameters.slowdown)
    with (
        checked_drives(
            [model] * parameters.drives, STORE_DRIVE_BYTES, report, checked=parameters.sizes[:1]
        ) as drives,
        file_systems(drives) as folders,
    ):
        with drives.unthrottled():
            stores.prepare(folders)
        rows = stores.run(folders, model, parameters.sizes, parameters.seconds, parameters.repeats)
    stores.report_rows(rows, report)
    Console(stderr=True, width=120).print(stores.table(rows))
    report.note(
        "stores: bytes read are checked by swarm_kv (checksums), DeepNVMe and "
        "LMCache, not by fio; LMCache by its own bench, a file per extent"
    )


def _compare_with_files(rows: dict[str, decoding.Row], report: Report) -> None:
    """swarm_kv against the fastest peer that reads everything from drives."""
    files = [
        statistics.median(row.rates)
        for name, row in rows.items()
        if row.peer.buffered and not row.reason and not name.endswith(decoding.WARM)
    ]
    for name in (SWARM, SWARM_EXACT):
        if files and name in rows and not rows[name].reason:
            ratio = statistics.median(rows[name].rates) / max(files)
            report.at_least(f"{name}: tokens per second / best of the peers on files", ratio, 1.0)


PARTS = {"models": run_models, "stores": run_stores}


COLUMNS = {
    "tokens per second": "tokens/s",
    "read per token": "read, MiB/token",
    "memory for KV": "memory for KV, MiB",
    "max |logit - full|": "largest difference of a logit",
    "mean KL(full || this)": "KL, nats",
    "same first token": "same first token",
}
FACTORS = {"read per token": 2**-20, "memory for KV": 2**-20}


def table(result: dict[str, Any]) -> str:
    """The peers as one table, for the page."""
    return tables.of_subjects(result, COLUMNS, digits=3, factors=FACTORS)
