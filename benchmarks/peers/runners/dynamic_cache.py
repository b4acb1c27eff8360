"""transformers' DynamicCache: everything in memory. With `offloading`, its own offloading of it."""

from transformers import DynamicCache

from benchmarks.peers.decoding import Session, serve


def make(model, setting):
    return Session(DynamicCache(config=model.config, **setting.options))


if __name__ == "__main__":
    serve(make)
