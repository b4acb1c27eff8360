"""A press of kvpress: entries are dropped for good after the prefill; the rest is in memory."""

import kvpress
from transformers import DynamicCache

from benchmarks.peers.decoding import Session, serve


def make(model, setting):
    press = getattr(kvpress, setting.options["press"])(
        compression_ratio=setting.options["compression_ratio"]
    )
    return Session(DynamicCache(), prefill=press(model))


if __name__ == "__main__":
    serve(make)
