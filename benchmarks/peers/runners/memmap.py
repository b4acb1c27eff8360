"""numpy.memmap per layer, mapped and read through at each step."""

import numpy as np
import torch

from benchmarks.peers.decoding import Session, serve
from benchmarks.peers.runners.layer_files import FileLayer, cache_of


class MappedLayer(FileLayer):
    def save(self, keys, values):
        self._shape = (2, *keys.shape)
        mapped = np.memmap(self.file, dtype=np.float32, mode="w+", shape=self._shape)
        mapped[0], mapped[1] = keys, values
        mapped.flush()

    def load(self):
        # Copy-on-write, because torch wants memory that can be written.
        mapped = np.memmap(self.file, dtype=np.float32, mode="c", shape=self._shape)
        return torch.from_numpy(mapped)


def make(model, setting):
    return Session(cache_of(MappedLayer, model, setting.folders))


if __name__ == "__main__":
    serve(make)
