"""torch.save per layer, and torch.load of it at each step."""

import torch

from benchmarks.peers.decoding import Session, serve
from benchmarks.peers.runners.layer_files import FileLayer, cache_of


class SavedLayer(FileLayer):
    def save(self, keys, values):
        torch.save((keys, values), self.file)

    def load(self):
        return torch.load(self.file)


def make(model, setting):
    return Session(cache_of(SavedLayer, model, setting.folders))


if __name__ == "__main__":
    serve(make)
