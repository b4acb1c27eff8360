"""oLLM's disk cache (`Inference.DiskCache`) with a model that stays in memory.

oLLM also keeps the weights on a drive, which is another question, and knows one directory.
"""

from ollm.kvcache import KVCache

from benchmarks.peers.decoding import Session, serve


def make(model, setting):
    (folder,) = setting.folders
    return Session(KVCache(cache_dir=str(folder), device="cpu"))


if __name__ == "__main__":
    serve(make)
