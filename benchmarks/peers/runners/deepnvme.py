"""DeepNVMe's aio handle: random extents of files, with O_DIRECT and libaio.

A handle per drive, because one handle waits for one extent after the other; an extent is read in
`PIECES` at once.
"""

from __future__ import annotations

import os
import pathlib
import random
import sys
import time

import torch

from benchmarks.peers.channel import Channel

PIECES = 4


def load():
    """The module, compiled for some minutes when it is not there."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(pathlib.Path(sys.prefix) / "torch_extensions")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False)


def main() -> None:
    channel = Channel()
    aio, example = load(), torch.empty(0, dtype=torch.uint8)
    for request in channel.requests():
        size, depth, files = request["size"], request["depth"], request["files"]
        handles = [aio.aio_handle(size // PIECES, PIECES, False, True, 1) for _ in files]
        pinned = [handle.new_cpu_locked_tensor(depth * size, example) for handle in handles]
        buffers = [list(each.split(size)) for each in pinned]
        offsets = random.Random(request["seed"])
        extents = os.path.getsize(files[0]) // size
        wrong, rounds = 0, -(-request["requests"] // (depth * len(files)))
        begin = time.perf_counter()
        for _ in range(rounds):
            chosen = [[offsets.randrange(extents) for _ in range(depth)] for _ in files]
            for number in range(depth):
                for handle, file, buffer, numbers in zip(
                    handles, files, buffers, chosen, strict=True
                ):
                    handle.async_pread(buffer[number], file, numbers[number] * size)
            for handle in handles:
                handle.wait()
            for buffer, numbers in zip(buffers, chosen, strict=True):
                first = torch.stack([each[:8] for each in buffer]).view(torch.int64).flatten()
                wrong += (first != torch.tensor(numbers) * (size // 4096)).sum().item()
        seconds = time.perf_counter() - begin
        if wrong:
            raise AssertionError(f"{wrong} extents have other contents than were written")
        for handle, each in zip(handles, pinned, strict=True):
            handle.free_cpu_locked_tensor(each)
        channel.answer(bytes=rounds * depth * len(files) * size, seconds=seconds)


if __name__ == "__main__":
    main()
