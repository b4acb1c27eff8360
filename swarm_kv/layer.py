"""The cache of one full-attention layer: transformers' interface over sequences in a store."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from . import autograd, compat, ops
from .dense import accumulation_dtype, add_sink_logits, dense_attention
from .errors import ArgumentError, StateError
from .selectors import Selector
from .sequence import Geometry, Sequence
from .step import Ahead, Cost, Part, Step
from .store import Store
from .untraced import untraced

if TYPE_CHECKING:
    from .profile import Profile

DECODE_QUERIES = 32
"""Longest call that counts as decoding (assisted decoding checks several tokens at once)."""


@dataclasses.dataclass
class CacheState:
    """What the layers of one cache share."""

    failure: str | None = None
    """Why the cache must not be used any more: some layers have a step that others lost."""
    step: int = -1
    """Number of the decoding step under way."""
    length: int = 0
    """Tokens per sequence before the step that is under way."""
    reached: int = -1
    """Layer that the step under way has come to."""
    profile: Profile | None = None
    """Of the context that the cache will hold, by probe texts."""


def another_batch(before: int, now: int | None) -> ArgumentError:
    """The error of a call with another number of sequences than a cache holds."""
    return ArgumentError(
        f"the batch changed from {before} to {now} sequences: select rows with "
        "batch_select_indices, or start a new cache"
    )


class _InferenceOnly(torch.autograd.Function):
    """Passes attention's output on and refuses a gradient, which would silently lack this part."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArgumentError(
            "swarm_kv's cache has no gradient: pass `use_cache=False` to train a patched model, or "
            "unpatch it"
        )


class SwarmLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer for all sequences of a batch.

    `update` only stages a call's keys and values, because it sees neither query nor mask; the
    attention function then calls `attend`, which attends, stores and returns the output.

    Args:
        store (`Store`): where entries lie.
        layer_idx (`int`): position among the model's layers.
        selector: chooses the entries of a decoding step.
        state (`CacheState`): shared by the layers of a cache.
    """

    is_sliding = False
    is_compileable = False  # generate() would otherwise compile the decoding step on CUDA
    is_croppable = True

    def __init__(self, store: Store, layer_idx: int, selector: Selector, state: CacheState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store
        self.layer_idx = layer_idx
        self.selector = selector
        self.state = state
        self._ahead: Ahead | None = None
        self.reset()

    # ---- transformers' cache layer interface

    def reset(self) -> None:
        """Forget everything; the space on the drives is free again."""
        self.keys = self.values = None
        self.is_initialized = False
        self.rows: list[Sequence] = []
        self.length = 0  # tokens per sequence, padding included
        self.valid: torch.Tensor | None = None  # bool [batch, length], as stored; None: no padding
        self._staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self._after_long_chunk = False
        self.drop_ahead()
        self.previous_query: torch.Tensor | None = None  # [batch, heads, 1, head_dim]
        self.cost: Cost | None = None  # of the last decoding step's reads

    def lazy_initialization(self, key_states: torch.Tensor, value_states: Any = None) -> None:
        """Learn batch size, shape and dtype from the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch = key_states.shape[0]
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage keys and values [batch, kv_heads, n, head_dim] and hand the layer to attention.

        Returns:
            The same two tensors: what is stored never leaves as one tensor.
        """
        if self._staged is not None:
            raise StateError(
                f"layer {self.layer_idx} was updated twice without attention in between: the model "
                'must run with attn_implementation="swarm_kv"; call swarm_kv.patch(model, config)'
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        elif key_states.shape[0] != self.batch:
            raise another_batch(self.batch, key_states.shape[0])
        self._staged = (key_states, value_states)
        self.length += key_states.shape[-2]
        compat.hand_over(self, key_states, kwargs)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Tokens per sequence, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of the keys that the next call attends to."""
        return self.length + int(query_length), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name before 5.14

    def crop(self, n: int) -> None:
        """Drop the newest tokens; `n` as in `compat.cropped_length`."""
        length = compat.cropped_length(self.length, n)
        count = self.length - length
        if not self.is_initialized or count == 0:
            return
        self.drop_ahead()
        for number, row in enumerate(self.rows):
            dropped = count
            if self.valid is not None:
                dropped = int(self.valid[number, length:].sum())
            row.crop(dropped)
        self.length = length
        self._set_valid(None if self.valid is None else self.valid[:, :length])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue sequence `beam_idx[i]` as sequence i. Moves no data."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in that order; repeated ones fork."""
        if not self.is_initialized:
            return
        self.drop_ahead()
        chosen = torch.as_tensor(indices).cpu().tolist()
        self.rows = [self.rows[i].fork() for i in chosen] if self.rows else []
        self._set_valid(None if self.valid is None else self.valid[chosen])
        if self.previous_query is not None:
            self.previous_query = self.previous_query[chosen]
        self.batch = len(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every sequence into `repeats` neighbours."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> SwarmLayer:
        """Fork: the copy shares what is stored and grows on its own."""
        other = SwarmLayer(
            self.store, self.layer_idx, self.selector, copy.deepcopy(self.state, memo)
        )
        if self.is_initialized:
            other.dtype, other.device, other.batch = self.dtype, self.device, self.batch
            other.is_initialized = True
            other.rows = [row.fork() for row in self.rows]
            other.length, other.valid = self.length, self.valid
            other._after_long_chunk = self._after_long_chunk
            other.previous_query = self.previous_query
        return other

    def offload(self) -> None:
        """Nothing to do: entries are on the drives already."""

    def prefetch(self) -> None:
        """Nothing to do: `read_ahead` is called with a query."""

    def _set_valid(self, valid: torch.Tensor | None) -> None:
        self.valid = None if valid is None or bool(valid.all()) else valid

    # ---- attention

    def holds(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the staged keys and values are these: some models change them in between."""
        return self._staged is not None and all(
            one is other or (one.dtype == other.dtype and torch.equal(one, other))
            for one, other in zip(self._staged, (key, value), strict=True)
        )

    def unstage(self) -> None:
        """Forget keys and values that were staged but will not be attended to."""
        if self._staged is not None:
            self.length -= self._staged[0].shape[-2]
            self._staged = None

    def decodes(self, past: int, count: int) -> bool:
        """Whether a call of `count` tokens after `past` others may read sparsely.

        A short call right after a long one is the rest of a prefill in chunks, which is exact.
        """
        rest_of_prefill = count > 1 and self._after_long_chunk
        return past > 0 and count <= DECODE_QUERIES and not rest_of_prefill

    @untraced  # reads and writes, sizes that change: nothing that a graph could hold
    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with the staged keys and values in place, and store them.

        Args:
            query: [batch, heads, n, head_dim], rotated.
            mask: bool [batch, length], False for padding; None without padding.
            scale: factor of the scores.
            softcap: see `ops.sparse_attention`.
            sinks: [heads], gpt-oss's logits without a value.

        Returns:
            [batch, n, heads, head_dim] in the query's dtype; zeros for padding queries.
        """
        staged, self._staged = self._staged, None
        assert staged is not None
        key, value = (tensor.detach().cpu() for tensor in staged)
        q = query.detach().cpu()
        count = q.shape[2]
        decoding = self.decodes(self.length - count, count)
        try:
            self._open_rows(q, key, scale)
            q, key, value = self._in_range(q, key, value, decoding)
            visible = self._record_mask(mask, count)
        except BaseException:
            self.length -= count
            raise
        try:
            with autograd.below():
                out = self._attend(query.detach(), q, key, value, visible, decoding, softcap, sinks)
        except BaseException as error:
            self.state.failure = f"layer {self.layer_idx}, token {self.length}: {error}"
            raise
        out = out.to(device=query.device, dtype=query.dtype)
        if torch.is_grad_enabled() and query.requires_grad:
            return _InferenceOnly.apply(out, query)
        return out

    def _attend(
        self,
        query: torch.Tensor,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: list[torch.Tensor | None],
        decoding: bool,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        count = q.shape[2]
        past = self.length - count
        self._after_long_chunk = count > DECODE_QUERIES
        if not decoding:
            self.drop_ahead()
        # Elsewhere than on the host, as `query` is, only where attention can run there.
        asking = query.to(q.dtype) if decoding and self.store.attends_on(query) else q
        rows: list[torch.Tensor] = [torch.empty(0)] * len(self.rows)  # [n, heads, dim] of each
        parts: list[Part] = []
        places: list[int] = []
        for number, row in enumerate(self.rows):
            if past == 0 and number > 0 and self._repeats(number, q, key, value):
                # Beams and num_return_sequences begin as copies of one prompt: store it once.
                self.rows[number] = self.rows[number - 1].fork()
                rows[number] = rows[number - 1]
                continue
            new = q[number], key[number], value[number]
            own = new[0] if asking is q else asking[number]
            if self.valid is not None:
                chosen = self.valid[number, past:]
                new = new[0][:, chosen], new[1][:, chosen], new[2][:, chosen]
                own = new[0] if asking is q else own[:, chosen.to(own.device)]
            part = Part(row, new[0], own, *new[1:], visible[number])
            if part.query.shape[1] == 0:
                continue
            if decoding:
                parts.append(part)
                places.append(number)
            else:
                rows[number] = self._prefill(part, softcap, sinks).transpose(0, 1)
        if parts:
            for number, attended in zip(places, self._decode(parts, softcap, sinks), strict=True):
                rows[number] = attended
        # A view would keep a whole prompt's.
        self.previous_query = q if count == 1 else q[:, :, -1:].clone()
        if self.valid is None:
            return rows[0][None] if len(rows) == 1 else torch.stack(rows)
        out = torch.zeros(
            q.shape[0],
            count,
            q.shape[1],
            value.shape[-1],
            dtype=accumulation_dtype(q.dtype),
            device=asking.device,
        )
        for number, attended in enumerate(rows):
            if attended.numel():
                out[number, self.valid[number, past:].to(out.device)] = attended
        return out

    def _open_rows(self, q: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        dtype = self.store.config.stored_dtype(key.dtype)
        geometry = Geometry(q.shape[1], key.shape[1], key.shape[3], dtype, scale)
        if self.rows:
            before = self.rows[0].geometry
            if before != geometry:
                raise ArgumentError(
                    f"layer {self.layer_idx} of this cache holds other keys than the model gives "
                    f"({before.difference(geometry)}): a cache serves one model in one dtype; "
                    "start a new cache"
                )
            return
        self.store.config.code_size(geometry.head_dim)  # or an error before anything is stored
        self.store.set_entry_bytes(geometry.entry_bytes)
        self.rows = [
            Sequence(
                self.store,
                geometry,
                f"layer {self.layer_idx} of sequence {number}",
                self.selector,
                None if self.state.profile is None else self.state.profile.bits_for(self.layer_idx),
            )
            for number in range(self.batch)
        ]

    def _in_range(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decoding: bool
    ) -> tuple[torch.Tensor, ...]:
        """Refuse numbers that `kv_dtype` cannot hold; a decoding step's in that dtype."""
        geometry = self.rows[0].geometry
        dtype = geometry.dtype
        given = {"query": q, "key": key, "value": value}
        if dtype == key.dtype:
            return q, key, value
        if decoding:  # few numbers: the calls are what takes time
            narrow = torch.cat(list(given.values()), 1).to(dtype)
            # What did not fit is infinite now.
            if math.isfinite(narrow.sum(dtype=torch.float32)):
                return narrow.split_with_sizes([tensor.shape[1] for tensor in given.values()], 1)
        limit = torch.finfo(dtype).max
        for name, tensor in given.items():
            if (greatest := float(torch.linalg.vector_norm(tensor, math.inf))) > limit:
                raise ArgumentError(
                    f"layer {self.layer_idx}: a {name} of magnitude {greatest:.6g} does not fit "
                    f'`kv_dtype` "{self.store.config.kv_dtype}", which ends at {limit:.6g}: use '
                    '"bfloat16" or "auto"'
                )
        return geometry.stored(q, key, value) if decoding else (q, key, value)

    def _record_mask(self, mask: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
        """Record which of the new tokens are padding, which is not stored.

        Returns:
            Per sequence, which of its entries the mask shows: None for all. A second turn may hide
            tokens of the first, such as those generated after an end of sequence.
        """
        batch, past = len(self.rows), self.length - count
        if mask is None and self.valid is None:
            return [None] * batch
        if mask is None or mask.shape[1] != self.length:
            given = "no padding" if mask is None else f"an attention_mask {list(mask.shape)}"
            raise ArgumentError(
                f"this cache holds {past} tokens with padding among them but the call of {count} "
                f"tokens came with {given}: pass the mask of all {self.length} tokens"
            )
        mask = mask.cpu()
        stored = self.valid
        if stored is None:
            stored = torch.ones(batch, past, dtype=torch.bool)
        if bool((mask[:, :past] & ~stored).any()):
            raise ArgumentError(
                "attention_mask shows tokens that were padding when they were cached: padding is "
                "not stored; start a new cache"
            )
        valid = torch.cat([stored, mask[:, past:]], dim=1)
        self._set_valid(valid)
        if torch.equal(mask, valid):
            return [None] * batch
        shown = [row_mask[row_valid] for row_mask, row_valid in zip(mask, valid, strict=True)]
        return [None if bool(entries.all()) else entries for entries in shown]

    def _repeats(
        self, number: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> bool:
        valid = self.valid
        return (
            (valid is None or torch.equal(valid[number], valid[number - 1]))
            and torch.equal(key[number], key[number - 1])
            and torch.equal(value[number], value[number - 1])
            and torch.equal(q[number], q[number - 1])
        )

    def _prefill(
        self, part: Part, softcap: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Exact attention of a chunk to itself and everything before it: [heads, n, dim]."""
        row, q, k, v, visible = part.row, part.query, part.key, part.value, part.visible
        how: dict[str, Any] = {"scale": row.geometry.scale, "softcap": softcap}
        attended = dense_attention(q, k, v, causal=True, **how)
        if len(row):
            past = None if visible is None else visible[: len(row)]
            before = itertools.chain(
                [row.gather(row.resident(past))], (kv for _, *kv in row.stream(past))
            )
            for kv in before:
                keys, values = (tensor.to(q.dtype) for tensor in kv)
                further = dense_attention(q, keys, values, causal=False, **how)
                attended = ops.merge_attention(*attended, *further)
        # Signatures know no soft cap, and tokens that this call hides are profiled all the same.
        complete = softcap is None and visible is None
        lse = attended[1] if complete else None
        if sinks is not None:
            attended = add_sink_logits(*attended, sinks.detach().cpu())
        q, k, v = row.geometry.stored(q, k, v)
        row.ingest(k, v, q, lse)
        return attended[0]

    def _decode(
        self, parts: list[Part], softcap: float | None, sinks: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Attend to sinks, window and what the selector chooses: one step for all rows."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.released:
            ahead = None
        logits = None if sinks is None else sinks.detach().to(parts[0].asking.device)
        try:
            step = Step(self.store, parts, softcap, logits)
            attended = step.run(self.selector, ahead, self.layer_idx, self.state.step)
        finally:
            if ahead is not None:
                ahead.release()
        self.cost = step.cost
        return attended

    def ingest(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        lse: torch.Tensor,
    ) -> None:
        """Store the first tokens as `update` and `attend` do, without attending.

        Serves several caches with what a model has computed once.

        Args:
            query: [batch, heads, n, head_dim], rotated. key, value: [batch, kv_heads, n, head_dim].
            scale: factor of the scores.
            lse: [batch, heads, n], log-sum-exp of the scores, see `Sequence.ingest`.

        Raises:
            StateError: tokens are there already.
        """
        if self.length:
            raise StateError(
                f"layer {self.layer_idx} holds {self.length} tokens already: start a new cache"
            )
        self.lazy_initialization(key)
        self.length = key.shape[2]
        self._open_rows(query, key, scale)
        for row, q, k, v, sums in zip(self.rows, query, key, value, lse, strict=True):
            q, k, v = row.geometry.stored(q, k, v)
            row.ingest(k, v, q, sums)
        self._after_long_chunk = self.length > DECODE_QUERIES
        self.previous_query = query[:, :, -1:].clone()

    # ---- reading ahead

    def expects(self, shape: torch.Size) -> bool:
        """Whether a call with hidden states [batch, n, features] will read from the drives."""
        batch, count = shape[:2]
        return (
            self._staged is None
            and self.state.failure is None
            and len(self.rows) == batch
            and self.decodes(self.length, count)
            and any(row.limit for row in self.rows)
        )

    def read_ahead(self, query: torch.Tensor, share: float, began: float) -> Ahead:
        """Start reading what a predicted query selects; the decoding step to come rides on it.

        Args:
            query: [batch, heads, n, head_dim], rotated, not scaled, of a call that `expects` knows.
            share: of the step's budget that is read ahead; above 1, to miss less.
            began: when predicting began, by `time.perf_counter`.

        Raises:
            ArgumentError: the query has another shape.
            CapacityError, StorageError: the reads could not be started.
        """
        self.drop_ahead()
        shape = self.rows[0].geometry
        wanted = (len(self.rows), shape.heads, query.shape[2], shape.head_dim)
        if query.shape != wanted:
            raise ArgumentError(
                f"a predicted query must be [batch, heads, n, head_dim] = {list(wanted)}, got "
                f"{list(query.shape)}"
            )
        predicted = query.detach().cpu().to(shape.dtype)
        with autograd.below():
            self._ahead = Ahead(self.store, self.rows, predicted, self.selector, share, began)
        return self._ahead

    def drop_ahead(self) -> None:
        """End reads that no step came for."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.release()
