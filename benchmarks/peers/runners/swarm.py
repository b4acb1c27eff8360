"""swarm_kv at its defaults, but for the memory that it may hold: a share of the context's KV."""

import math

import swarm_kv
from benchmarks.peers.decoding import Session, serve
from swarm_kv.cache import kv_bytes


def make(model, setting):
    share = setting.options["dram_share"]
    size = kv_bytes(model.config, model.dtype, setting.context)
    swarm = swarm_kv.patch(
        model,
        swarm_kv.SwarmConfig(
            paths=[str(folder) for folder in setting.folders],
            sparsity=setting.options["sparsity"],
            dram_bytes=math.ceil(share * size),
        ),
    )
    return Session(swarm.new_cache())


if __name__ == "__main__":
    serve(make)
