"""Two processes that share a model: each keeps the KV of its own heads.

Run as a script by torchrun, this file is one of the two processes.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import distributed
from transformers.distributed import DistributedConfig

import swarm_kv
from swarm_kv import compat
from swarm_kv.cache import entry_bytes, minimum_dram_bytes
from swarm_kv.predictors import Projection
from swarm_kv.prefetch import Rope, source_of
from tests.conftest import make_tiny_model
from tests.hf.test_equivalence import settings, teacher_forced

ROOT = pathlib.Path(__file__).parent.parent
PROMPT, STEPS, LAYERS = 200, 12, 4  # of `teacher_forced` and tiny models


def torchrun(script: pathlib.Path, *arguments: str) -> str:
    """What two processes print."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tight(paths: list[str], kv_heads: int) -> swarm_kv.SwarmConfig:
    """Just as much memory as a model with a large window and so many KV heads needs."""
    config = settings(paths, window=20_000)
    text = make_tiny_model("qwen3").config
    least = minimum_dram_bytes(text, config, torch.float64, kv_heads=kv_heads)
    return settings(paths, window=20_000, dram_bytes=least)


@pytest.mark.skipif(
    "tp_size" not in inspect.signature(DistributedConfig).parameters,
    reason="this transformers takes `tp_plan` instead",
)
def test_the_example(tmp_path: pathlib.Path) -> None:
    drives = [tmp_path / f"drive{number}" for number in range(4)]
    for drive in drives:
        drive.mkdir()
    printed = torchrun(ROOT / "examples" / "tensor_parallel.py", *map(str, drives))
    for rank in (1, 2):
        assert f"process {rank} of 2: " in printed
    assert printed.count("to 2 drives; logits within") == 2


def test_a_model_that_torch_splits(tmp_path: pathlib.Path) -> None:
    printed = torchrun(pathlib.Path(__file__), str(tmp_path)).splitlines()
    reports = json.loads(next(line for line in printed if line.startswith("[{")))  # gloo talks too
    config = make_tiny_model("qwen3").config
    whole = entry_bytes(config, torch.float64)
    for report in reports:
        assert report["difference"] < 1e-9
        assert report["entry_bytes"] == whole / 2
        assert report["prefetches"] == STEPS * LAYERS
        assert report["warnings"] == []
        assert report["predicted"]
    # A rank may have the memory of its own heads only; one process needs that of all.
    with pytest.raises(swarm_kv.CapacityError, match="below the minimum"):
        swarm_kv.patch(make_tiny_model("qwen3"), tight([str(tmp_path)], 1))


# ---- one of the processes


def split(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    for layer in model.model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)


@torch.no_grad()
def predicts_its_part(model: Any, ids: torch.Tensor) -> bool:
    """Whether a layer's projection of its own input is the query of this process's heads."""
    layers = model.model.layers
    inputs: dict[int, Any] = {}
    queries: dict[int, torch.Tensor] = {}

    def attention(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> Any:
        queries[module.layer_idx] = query
        return query.transpose(1, 2).contiguous(), None

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: inputs.update({number: (args[0], kwargs)}),
            with_kwargs=True,
        )
    with compat.registered("recorder", attention, lambda **_: None):
        model.set_attn_implementation("recorder")
        model(ids, use_cache=False)
        model.set_attn_implementation("sdpa")
    return all(
        query.shape[1] == 4
        and torch.equal(
            Projection(layers[number])(
                inputs[number][0],
                Rope(model.model, number)(inputs[number][0], inputs[source_of(number)][1]),
            ),
            query,
        )
        for number, query in queries.items()
    )


def main(folder: str) -> None:
    """Prints, in one process, what both have seen."""
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(1)
    model = make_tiny_model("qwen3")
    ids = torch.randint(3, 128, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    split(model, init_device_mesh("cpu", (ranks,)))

    paths = [pathlib.Path(folder, f"rank{rank}", f"drive{number}") for number in range(2)]
    for path in paths:
        path.mkdir(parents=True)
    own = [str(path) for path in paths]
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("swarm_kv.prefetch").addHandler(handler)
    with swarm_kv.patch(model, settings(own, prefetch="post_attention")) as swarm:
        got = teacher_forced(model, ids, mask)
        counters = swarm.store.counters()
        prefetches = swarm.stats().prefetch.prefetches
    swarm_kv.patch(model, tight(own, 1)).unpatch()
    report = {
        "difference": (got - expected).abs().max().item(),
        "entry_bytes": counters["entry_bytes"],
        "prefetches": prefetches,
        "warnings": warnings,
        "predicted": predicts_its_part(model, ids),
    }
    reports: list[Any] = [None] * ranks
    distributed.all_gather_object(reports, report)
    if rank == 0:
        print(json.dumps(reports))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
