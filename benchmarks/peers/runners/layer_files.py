"""A cache whose layers are files, written once after the prefill and read at each decoding step.

What people write when memory is short. Tokens decoded since then stay in memory. Layers take the
drives in turn.
"""

from __future__ import annotations

import torch
from transformers import Cache, DynamicLayer


class FileLayer(DynamicLayer):
    """A layer in the file `file`; `save(keys, values)` and `load()` say in which form."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self._stored = 0

    def update(self, key_states, value_states, *args, **kwargs):
        if not self._stored:
            self._stored = key_states.shape[-2]
            self.save(key_states.contiguous(), value_states.contiguous())
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        recent = super().update(key_states, value_states)
        stored = self.load()
        return tuple(torch.cat(pair, dim=-2) for pair in zip(stored, recent, strict=True))

    def get_seq_length(self):
        return self._stored + super().get_seq_length()


def cache_of(layer, model, folders):
    """A cache of `layer`s, one per layer of the model."""
    count = model.config.num_hidden_layers
    return Cache(layers=[layer(folders[i % len(folders)] / f"layer{i}") for i in range(count)])
