"""A store as Python holds it: the handle, and what lives in it for as long as it is referenced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import device, errors, pinned
from . import store_ops as _store_ops  # noqa: F401  (registers the operators)
from .background import Background
from .config import SwarmConfig
from .meter import Meter, Stats, make_stats

logger = logging.getLogger(__name__)

_ops: Any = torch.ops.swarm_kv
NOTHING = torch.empty(0, dtype=torch.int64)


class Store:
    """Drives and the fast memory before them (`csrc/core/store.h`).

    One store may hold the caches of many sequences; `dram_bytes` counts them all. All methods may
    be called from several threads.

    Args:
        config (`SwarmConfig`): where and how.

    Raises:
        StorageError: a path does not exist, is not writable, or is full.
        CapacityError: `dram_bytes` does not hold the staging memory.
        ArgumentError: an unknown strategy or engine.
    """

    def __init__(self, config: SwarmConfig) -> None:
        self.config = config
        t_base, t_transfer = config.device_model or (0.0, 0.0)
        with errors.converted():
            self._handle: int = _ops.store_open(
                list(config.paths),
                config.engine,
                config.direct,
                config.shared_ring,
                config.timeout,
                config.dram_bytes,
                config.staging,
                config.disk_bytes or 0,
                config.placement,
                config.router,
                config.cache_policy,
                config.verify,
                t_base,
                t_transfer,
            )
        self._pool: torch.Tensor = _ops.store_pool(self._handle)
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._open = True
        self._device: torch.device | None = None
        self.scorer: device.Scorer | None = None
        self.meter = Meter()
        self.background = Background()
        self._pinned = pinned.pin(
            self._pool.data_ptr(), config.staging // mmap.PAGESIZE * mmap.PAGESIZE
        )
        self._finalizer = _on_collection(self, _close, self._handle, self._pinned)
        for note in self.notes():
            logger.warning("swarm_kv: %s", note)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._open

    def close(self) -> None:
        """Give drives and memory back. Closing twice is allowed.

        Raises:
            StateError: fetches are outstanding.
        """
        if self._open:
            self.background.stop()
            with errors.converted():
                _ops.store_close(self._handle)
            self._open = False
            self._finalizer.detach()
            if self._pinned is not None:
                self._pinned.release()
            self._views.clear()
            self._pool = torch.empty(0, dtype=torch.uint8)  # the mapping goes with the last view

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        """All entries in fast memory as one flat tensor of `dtype`; slots index it in bytes.

        Raises:
            StateError: the store is closed.
        """
        if not self._open:
            raise errors.StateError("the store is closed: open another one")
        view = self._views.get(dtype)
        if view is None:
            usable = self._pool.numel() // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self._pool[:usable].view(dtype)
        return view

    def set_entry_bytes(self, entry_bytes: int) -> None:
        """Fix the size of an entry. Another size later is an `ArgumentError`."""
        with errors.converted():
            _ops.store_set_entry_bytes(self._handle, entry_bytes)

    def charge(self, size: int) -> None:
        """Count bytes that an index holds in Python against `dram_bytes`; negative gives back."""

        def charge() -> None:
            with errors.converted():
                _ops.store_charge(self._handle, size)

        self.background.make_room(charge)

    def attends_on(self, query: torch.Tensor) -> bool:
        """Whether decoding steps of queries like this one are answered on their device.

        The first device that is asked for and can becomes the store's: it gets `hbm_bytes`, for
        entries and for codes, and room for what passes through.

        Args:
            query: [..., head_dim], of entries whose size is fixed.

        Raises:
            CapacityError: the device has no room for `hbm_bytes`, or the staging memory none for
                copies.
        """
        if not device.attends(query):
            return False
        if self._device is None:
            assert isinstance(self.config.hbm_bytes, int)
            codes = self.config.hbm_bytes // device.INDEX_SHARE
            with errors.converted():
                opened = _ops.device_open(query)
                _ops.store_attach(self._handle, opened, self.config.hbm_bytes - codes)
            self._device = query.device
            self.scorer = device.Scorer(query.device, codes)
        return self._device == query.device

    def counters(self) -> dict[str, Any]:
        """The counters of `csrc/core/stats_json.h`."""
        with errors.converted():
            counters: dict[str, Any] = json.loads(_ops.store_stats(self._handle))
        counters["hbm"]["index"] = 0 if self.scorer is None else self.scorer.used
        return counters

    def stats(self) -> Stats:
        """State and totals; see `Stats`."""
        return make_stats(self.counters(), self.meter)

    def notes(self) -> list[str]:
        """What these drives lack of O_DIRECT, io_uring, cuFile and locked memory, and why."""
        with errors.converted():
            text: str = _ops.store_notes(self._handle)
        return text.splitlines()

    def append(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Copy keys and values [kv_heads, n, head_dim] into window slots [n]."""

        def append() -> torch.Tensor:
            with errors.converted():
                slots: torch.Tensor = _ops.window_append(self._handle, k, v)
            return slots

        return self.background.make_room(append)

    def retain(self, slots: torch.Tensor) -> None:
        """Add one reference to each window slot."""
        with errors.converted():
            _ops.window_retain(self._handle, slots)

    def release(self, slots: torch.Tensor) -> None:
        """Drop one reference of each window slot; a closed store has none left."""
        if self._open and slots.numel():
            with errors.converted():
                _ops.window_release(self._handle, slots)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: torch.Tensor,
        members: torch.Tensor,
        label: str,
        activations: torch.Tensor | None = None,
        initial_fill: str = "none",
        profile_queries: int = 0,
        codec: str = "none",
        starts: torch.Tensor | None = None,
    ) -> Segment:
        """Write entries [kv_heads, n, head_dim] to the drives, grouped in clusters.

        Args:
            k, v: keys and values.
            offsets, members: int32, cluster c holds `members[offsets[c]:offsets[c + 1]]`; members
                behind the last cluster are loose: in none, read one by one.
            label: names the segment in errors.
            activations: int32 [n], how many of the profile's queries activated each entry. With
                it, the cluster cache begins with the entries that are worth most.
            initial_fill: what they are worth (Eq. 6): `printed`, `product`, or `none`, which leaves
                the cache as it is.
            profile_queries: length of the profile.
            codec: form of the entries on the drives, see csrc/core/codec.h.
            starts: int32 [clusters], the drive that each begins on, -1 for the next in turn; see
                csrc/core/placement.h.

        Raises:
            StorageError: a drive failed or is full. CapacityError: `dram_bytes` or `disk_bytes`.
            ArgumentError: clusters or activations do not fit the entries, unknown codec, or numbers
                that it cannot hold.
        """

        def write() -> int:
            with errors.converted():
                handle: int = _ops.segment_write(
                    self._handle,
                    k,
                    v,
                    offsets,
                    members,
                    label,
                    activations,
                    initial_fill,
                    profile_queries,
                    codec,
                    starts,
                )
            return handle

        handle = self.background.make_room(write)
        return Segment(self, handle, k.shape[1], offsets.numel() - 1, members.numel())

    def clusters(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and members of a segment as the store holds them: int32, not copies."""
        with errors.converted():
            offsets, members = _ops.segment_clusters(self._handle, segment.handle)
        return offsets, members

    def drives_of(self, segment: Segment) -> torch.Tensor:
        """Drive of each member of a segment's clusters: uint8, not a copy."""
        with errors.converted():
            drives: torch.Tensor = _ops.segment_drives(self._handle, segment.handle)
        return drives

    def fetch(
        self, rows: Iterable[Wanted], *, purpose: str = "decode", ahead: Fetch | None = None
    ) -> Fetch:
        """Start reading clusters and single entries of a layer; returns at once. See `Fetch`.

        Args:
            rows: what each sequence of a batch wants. What several want, because forks share
                segments, is read once.
            purpose: `decode` counts as an activation and feeds the cluster cache, `prefetch` feeds
                it, `stream` leaves it as it is.
            ahead: a prefetch of the same layer. What it has delivered or in flight is not read
                again. It becomes a part of the new fetch and is released with it.

        Raises:
            ArgumentError: a number does not exist, or `ahead` is no prefetch.
            StateError: the store is closed, or `ahead` was released.
        """
        return Fetch(self, rows, purpose, ahead)

    def fetch_attend(
        self, rows: Sequence[Wanted], asking: Asking, ahead: Fetch | None = None
    ) -> FetchedAttention:
        """Read what a decoding step wants and attend to it, and to what is in memory, as it comes.

        The same as `fetch` for `decode`, with attention to each part while others are being read,
        in one operator. Nothing is held afterwards; `ahead` ends with it. Attention runs on the
        device of the queries: the host, or the one that the store attends on.

        Args:
            rows: what each sequence of a batch wants.
            asking: who attends, and to what beside.
            ahead: see `fetch`.

        Raises:
            ArgumentError, StateError: see `fetch`.
            StorageError, CapacityError: see `Fetch.rounds`.
        """
        sizes = (sum(piece.numel() for piece in pieces) for pieces in asking.own)
        with errors.converted():
            out, lse, ids, bounds, submitting, waiting = _ops.fetch_attend(
                self._handle,
                *_wanted_rows(rows),
                _ticket_of(ahead),
                asking.q,
                asking.queries,
                torch.cat(list(itertools.chain.from_iterable(asking.own))),
                [0, *itertools.accumulate(sizes)],
                asking.kv_heads,
                asking.scale,
                asking.sinks,
                asking.softcap,
                asking.visible,
            )
        if ahead is not None:
            ahead.give_up()
        split = [ids] if len(rows) == 1 else list(ids.split(bounds.diff().tolist()))
        return FetchedAttention(out, lse, split, submitting, waiting)


def _on_collection(owner: Any, function: Any, *args: Any) -> weakref.finalize[Any, Any]:
    finalizer = weakref.finalize(owner, _outside_tracing, function, *args)
    finalizer.atexit = False  # the process gives everything back by ending, in no order
    return finalizer


def _outside_tracing(function: Any, *args: Any) -> None:
    # Objects are collected at any time, and then a compiler that traces another function must not
    # take the call for a part of it.
    with _disable_current_modes():
        function(*args)


def _close(handle: int, memory: pinned.Pinned | None) -> None:
    with contextlib.suppress(RuntimeError):
        _ops.store_close(handle)  # first: it waits for copies from this memory
    if memory is not None:
        memory.release()


class Segment:
    """Entries on the drives, freed when the last reference goes.

    Attributes:
        entries: how many. copies: the same with replicas.
        clusters: how many hold them; loose entries are in none.
    """

    def __init__(self, store: Store, handle: int, entries: int, clusters: int, copies: int) -> None:
        self.handle = handle
        self.entries = entries
        self.clusters = clusters
        self.copies = copies
        _on_collection(self, _free_segment, store, handle)


def _free_segment(store: Store, handle: int) -> None:
    if not store.closed:
        _ops.segment_free(store._handle, handle)


class IndexCharge:
    """Memory that an index holds in Python, counted until the last reference goes.

    Raises:
        CapacityError: `dram_bytes` has no room for it.
    """

    def __init__(self, store: Store, size: int) -> None:
        store.charge(size)
        self.size = size
        self._finalizer = _on_collection(self, _return_charge, store, size)

    def release(self) -> None:
        """Give the memory back now."""
        self._finalizer()


def _return_charge(store: Store, size: int) -> None:
    if not store.closed:
        store.charge(-size)


class Wanted(NamedTuple):
    """What one sequence wants of one layer.

    Attributes:
        segments: the layer's segments, in order; clusters and entries are numbered through.
        clusters, entries: int64, taken whole and one by one; either may repeat the other.
        limit: entries at or above it are left out.
    """

    segments: tuple[Segment, ...]
    clusters: torch.Tensor
    entries: torch.Tensor
    limit: int


class Asking(NamedTuple):
    """The queries of a decoding step, and what they see beside what is read for them.

    Attributes:
        q: [Q, heads, head_dim], the rows of all sequences, one sequence after another.
        queries: how many of them each has, at least 1.
        own: per sequence, slots in pieces that follow each other: its queries' own tokens last, of
            which query i of n sees all but the last n - 1 - i.
        kv_heads, scale, sinks, softcap: see `ops.sparse_attention`.
        visible: bool, for the entries below the `limit` of each sequence, one after another:
            False for those that are not attended to. None: all are.
    """

    q: torch.Tensor
    queries: list[int]
    own: list[list[torch.Tensor]]
    kv_heads: int
    scale: float
    sinks: torch.Tensor | None
    softcap: float | None
    visible: torch.Tensor | None


class FetchedAttention(NamedTuple):
    """What `Store.fetch_attend` returns.

    Attributes:
        out, lse: see `ops.sparse_attention`.
        ids: per sequence, int64 numbers of the stored entries that were fetched.
        submitting, waiting: seconds that it took to start the reads, and to wait for them.
    """

    out: torch.Tensor
    lse: torch.Tensor
    ids: list[torch.Tensor]
    submitting: float
    waiting: float


Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Per row: int64 numbers of entries through the row's segments, and their slots: byte offsets in
the pool."""


def _ragged(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    values = parts[0] if len(parts) == 1 else torch.cat([NOTHING, *parts])
    return values, _bounds(*(part.numel() for part in parts))


@functools.lru_cache(maxsize=64)  # a step mostly reads as many entries as the last one
def _bounds(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)])


def _wanted_rows(rows: Sequence[Wanted]) -> tuple[Any, ...]:
    """`rows` as operators take them."""
    segments = [[segment.handle for segment in row.segments] for row in rows]
    return (
        list(itertools.chain(*segments)),
        [0, *itertools.accumulate(map(len, segments))],
        *_ragged([row.clusters for row in rows]),
        *_ragged([row.entries for row in rows]),
        [row.limit for row in rows],
    )


def _ticket_of(ahead: Fetch | None) -> int:
    if ahead is None:
        return 0
    if ahead.ended:
        raise errors.StateError("the prefetch was released: fetch without `ahead`")
    return ahead.ticket


def _split(ids: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Rows:
    bounds = rows.tolist()
    return [(ids[a:b], slots[a:b]) for a, b in itertools.pairwise(bounds)]


class Fetch:
    """Reads under way, for all rows of a batch. A context manager: it ends with the block.

    Attributes:
        resident: what was in fast memory already, valid until the fetch ends.
    """

    def __init__(
        self, store: Store, rows: Iterable[Wanted], purpose: str, ahead: Fetch | None
    ) -> None:
        self._store = store
        self._rows = list(rows)  # their segments are not freed while being read
        early = _ticket_of(ahead)
        with errors.converted():
            ticket, *resident = _ops.fetch_submit(
                store._handle, *_wanted_rows(self._rows), purpose, early
            )
        if ahead is not None:
            ahead.give_up()
        self._held: list[int | None] = [ticket]  # shared with the finalizer
        self._finalizer = _on_collection(self, _release_ticket, store, self._held)
        self.resident: Rows = _split(*resident)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or became a part of another one."""
        return self._held[0] is None

    @property
    def ticket(self) -> int:
        """Handle of the reads.

        Raises:
            StateError: the fetch has ended, or became a part of another one.
        """
        if self._held[0] is None:
            raise errors.StateError("the fetch has ended, or became a part of another one")
        return self._held[0]

    def give_up(self) -> None:
        """Forget the reads, which are a part of another fetch now."""
        self._held[0] = None

    def rounds(self) -> Iterator[Rows]:
        """Yield pieces as reads arrive; the slots of one round end with the next.

        Raises:
            StorageError: an entry could not be read intact from any drive that holds it.
            CapacityError: other fetches hold the staging memory; release them and call again.
            StateError: the fetch has ended, or became a part of another one.
        """
        more = True
        while more:
            ticket = self.ticket
            with errors.converted():
                *arrived, more = _ops.fetch_wait(self._store._handle, ticket)
            if arrived[0].numel():
                yield _split(*arrived)

    def complete(self) -> None:
        """Wait for everything; see `rounds`."""
        for _ in self.rounds():
            pass

    def release(self) -> None:
        """Give staging memory and cache pins back, whatever is in flight. Twice is allowed."""
        self._finalizer()

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _release_ticket(store: Store, held: list[int | None]) -> None:
    ticket, held[0] = held[0], None
    if ticket is not None and not store.closed:
        # A wait that failed may have released it; an interrupted one (Ctrl-C) has not.
        with contextlib.suppress(errors.StateError), errors.converted():
            _ops.fetch_release(store._handle, ticket)


class Window:
    """Entries of one sequence in fast memory, oldest first. Forks share them.

    Attributes:
        slots: int64 [n], byte offsets in the pool.
    """

    def __init__(self, store: Store, slots: torch.Tensor = NOTHING) -> None:
        self._store = store
        self._held = [slots]  # shared with the finalizer, which must not reference self
        _on_collection(self, _release_window, store, self._held)

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the entries."""
        return self._held[0]

    def __len__(self) -> int:
        return self._held[0].numel()

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add entries [kv_heads, n, head_dim] at the end."""
        if k.shape[1]:
            self._held[0] = torch.cat([self._held[0], self._store.append(k, v)])

    def drop_oldest(self, count: int) -> None:
        """Remove `count` entries from the front."""
        dropped, self._held[0] = self._held[0][:count], self._held[0][count:].clone()
        self._store.release(dropped)

    def drop_newest(self, count: int) -> None:
        """Remove `count` entries from the end."""
        keep = max(0, len(self) - count)
        dropped, self._held[0] = self._held[0][keep:], self._held[0][:keep].clone()
        self._store.release(dropped)

    def fork(self) -> Window:
        """Another window with the same entries; nothing is copied."""
        if len(self):
            self._store.retain(self.slots)
        return Window(self._store, self.slots)


def _release_window(store: Store, held: list[torch.Tensor]) -> None:
    store.release(held[0])
