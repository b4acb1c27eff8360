"""One sequence in one layer: what lies on the drives, what stays in memory, how it grows.

Entries are numbered without padding, oldest first:

    sinks | stored on the drives | window

Sinks and window are slots in fast memory; stored entries are written once and shared by forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator

import torch

from . import maintenance, recode, rewrite
from .background import Job
from .codes import Codebook, train
from .config import SwarmConfig
from .dense import accumulation_dtype
from .entries import Geometry as Geometry
from .entries import gather, read_entries
from .errors import CapacityError
from .index import Index, build, concatenated, sequence_blocks
from .layout import Layout, Problem, Queries, choose, in_sequence
from .maintenance import Activity, Drift, Lot, RecentQueries
from .means import ClusterMeans
from .selectors import Selector, summary_of
from .store import NOTHING, IndexCharge, Segment, Store, Wanted, Window
from .store_ops import stored_entry_bytes
from .summary import Clustered

logger = logging.getLogger(__name__)

MEANS_BLOCK = 64
"""Neighbours that share a mean key and value: 2 % of the entries' memory. Means per cluster lower
the error further, but clusters are so small that they take a quarter to a half of it."""
GRACE = 2
"""Times that entries leave the window between the start of a rewriting and its adoption. Fixed, so
that the same prompt gives the same text; a longer one is waited for."""
PATIENCE = 10.0
"""Seconds of that wait, after which decoding goes on with the old layout until entries leave the
window again."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Last queries of a chunk, kept on the drives until the whole context is clustered.

    They ride as entries: `segment` holds them, half as keys and half as values.
    """

    segment: Segment
    positions: torch.Tensor
    """int64 [queries]: each query's own token, in the sequence's numbering."""
    lse: torch.Tensor | None
    """float32 [heads, queries], see `layout.Queries`."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a sequence has on the drives. Immutable and shared by forks."""

    segments: tuple[Segment, ...]
    index: Index
    charges: tuple[IndexCharge, ...]
    profile: Profile | None = None
    means: ClusterMeans | None = None
    """Stand in for what a step does not read, with `estimate_unfetched`."""

    @property
    def entries(self) -> int:
        """Number of stored entries, cropped ones included."""
        return self.index.entries


class Sequence:
    """The entries of one sequence in one layer.

    Args:
        store: where they lie.
        geometry: shape of an entry.
        label: names the layer and sequence in errors.
        selector: what decoding steps choose entries with; layouts are judged by it.
        probes: int64 [tokens, words], signatures of the first tokens by queries of probe texts,
            which count beside those of the prefill.
    """

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        label: str,
        selector: Selector,
        probes: torch.Tensor | None = None,
    ) -> None:
        self.store = store
        self.geometry = geometry
        self.label = label
        self.sinks = Window(store)
        self.stored: Stored | None = None
        self.limit = 0
        self.window = Window(store)
        self.selector = selector
        self.probes = probes
        self._summarise = summary_of(selector)
        self._strategy = maintenance.resolve(store.config.maintenance)
        steps = min(store.config.window, maintenance.OBSERVED_STEPS)
        self._activity = Activity(steps) if maintenance.needs_bits(self._strategy) else None
        self._recent = RecentQueries(steps)
        self._recent_charge: IndexCharge | None = None
        self._drift = Drift()
        self._drifted = False
        self._rewriting: tuple[Job[rewrite.Rewritten], int] | None = None
        self._recoding: tuple[Job[tuple[Codebook, torch.Tensor]], int] | None = None
        self._quiet_until = 0

    @property
    def config(self) -> SwarmConfig:
        """Settings of the store."""
        return self.store.config

    def __len__(self) -> int:
        return len(self.sinks) + self.limit + len(self.window)

    def fork(self) -> Sequence:
        """A sequence with the same entries that grows on its own; nothing is copied."""
        other = Sequence(self.store, self.geometry, self.label, self.selector, self.probes)
        other.sinks, other.window = self.sinks.fork(), self.window.fork()
        other.stored, other.limit = self.stored, self.limit
        other._activity = None if self._activity is None else self._activity.copy()
        other._recent, other._recent_charge = self._recent.copy(), self._recent_charge
        other._drift, other._drifted = self._drift.copy(), self._drifted
        other._rewriting, other._recoding = self._rewriting, self._recoding
        other._quiet_until = self._quiet_until
        return other

    # ---- reading

    def index(self) -> Index | None:
        """Index of the stored entries, or None when there are none in reach."""
        if self.stored is None or self.limit == 0:
            return None
        if self.stored.index.limit == self.limit:
            return self.stored.index
        return self.stored.index.cropped(self.limit)

    def resident(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Slots of sinks and window, oldest first, in bytes.

        Args:
            visible: bool [entries]; only these. None for all.
        """
        slots = torch.cat([self.sinks.slots, self.window.slots])
        if visible is None:
            return slots
        window = len(self) - len(self.window)
        return slots[torch.cat([visible[: len(self.sinks)], visible[window:]])]

    def stored_part(self, visible: torch.Tensor) -> torch.Tensor:
        """Of bool [entries], what concerns the stored entries in reach."""
        return visible[len(self.sinks) : len(self.sinks) + self.limit]

    def estimate(
        self,
        means: ClusterMeans,
        query: torch.Tensor,
        fetched: torch.Tensor,
        visible: torch.Tensor | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the stored entries that were not `fetched`, by the means of their groups.

        Args:
            means: of the stored entries.
            query: [heads, queries, head_dim], scaled.
            fetched: int64 numbers of stored entries.
            visible: bool [entries], those that are attended to; None for all.
            softcap: see `ops.sparse_attention`.

        Returns:
            out [queries, heads, head_dim] and lse [queries, heads], in the accumulation dtype.
        """
        passed_over = torch.zeros(means.group_of.numel(), dtype=torch.bool)
        passed_over[fetched] = True
        passed_over[self.limit :] = True
        if visible is not None:
            passed_over[: self.limit] |= ~self.stored_part(visible)
        out, lse = means.estimate(query, passed_over.nonzero()[:, 0], softcap)
        dtype = accumulation_dtype(self.geometry.dtype)
        return out.transpose(0, 1).to(dtype).contiguous(), lse.T.to(dtype).contiguous()

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, head_dim] of slots, copied out of the pool."""
        return gather(self.store, self.geometry, slots)

    def stream(
        self, visible: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All stored entries, piece by piece: numbers, keys and values. Leaves the cache alone.

        Args:
            visible: bool [entries of the sequence]; only these. None for all.
        """
        if self.stored is None or self.limit == 0:
            return
        everything = torch.arange(self.limit, dtype=torch.int64)
        if visible is not None:
            everything = everything[self.stored_part(visible)]
        wanted = Wanted(self.stored.segments, NOTHING, everything, self.limit)
        with self.store.fetch([wanted], purpose="stream") as fetch:
            for ((ids, slots),) in itertools.chain([fetch.resident], fetch.rounds()):
                if ids.numel():
                    yield ids, *self.gather(slots)

    def read_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, limit, head_dim] of all stored entries."""
        segments = () if self.stored is None else self.stored.segments
        return read_entries(self.store, self.geometry, segments, 0, self.limit)

    # ---- growing

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add the newest entries [kv_heads, n, head_dim] to fast memory."""
        self.window.append(*self._fill_sinks(k, v))

    def _fill_sinks(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the first entries of the sequence its sinks; returns the other ones."""
        first = min(k.shape[1], self.config.sinks - len(self.sinks))
        if first == 0:
            return k, v
        self.sinks.append(k[:, :first], v[:, :first])
        return k[:, first:], v[:, first:]

    def ingest(
        self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Add a prefill chunk: the newest entries stay in the window, the others go to the drives.

        Args:
            k, v: [kv_heads, n, head_dim].
            q: [heads, n, head_dim], not scaled: the chunk's queries, whose last ones are the
                profile (a context is profiled by its own queries).
            lse: [heads, n], log-sum-exp of the chunk's scores, which attention knows anyway;
                computed again where it is needed, if not given.
        """
        before = len(self)
        fresh_k, fresh_v = self._fill_sinks(k, v)
        leaving = len(self.window) + fresh_k.shape[1] - self.config.window
        if leaving < self.config.flush:
            self.window.append(fresh_k, fresh_v)
            return
        old_k, old_v = self.gather(self.window.slots)
        fresh_k, fresh_v = torch.cat([old_k, fresh_k], 1), torch.cat([old_v, fresh_v], 1)
        last = slice(-self.config.profile_queries, None)
        queries = Queries(
            q[:, last],
            torch.arange(before, before + q.shape[1])[last],
            None if lse is None else lse[:, last].float(),
        )
        leave_k, leave_v = fresh_k[:, :leaving], fresh_v[:, :leaving]
        if self.stored is None:
            # The chunk is the whole context so far: cluster it by its own queries at once.
            head = self.gather(self.sinks.slots)[0]
            all_keys = torch.cat([head, fresh_k], dim=1)
            self._write_first(leave_k, leave_v, all_keys, queries)
        else:
            self._write(leave_k, leave_v, self._save_profile(queries))
        self.window.drop_oldest(len(self.window))
        self.window.append(fresh_k[:, leaving:], fresh_v[:, leaving:])
        if self._activity is not None:
            self._activity.resize(0)

    def observe(self, query: torch.Tensor, wanted: torch.Tensor) -> None:
        """After a decoding step's selection: note what it says about what belongs together.

        Args:
            query: [heads, n, head_dim], scaled.
            wanted: int64 numbers of the stored entries that it selected.
        """
        stored = self.stored
        if self._activity is not None and stored is not None:
            activity, index = self._activity, stored.index
            activity.resize(len(self.window))
            selected = torch.zeros(index.entries, dtype=torch.bool)
            selected[wanted] = True
            keys = self.gather(self.window.slots)[0]
            activity.note(
                maintenance.active_in_window(query, keys, self.config.sparsity),
                selected[index.members[index.offsets[:-1].long()].long()],
            )
        if self._recent.due() and self._may_keep_queries():
            self._recent.note(query[:, -1].to(self.geometry.dtype), len(self))

    def _may_keep_queries(self) -> bool:
        if self._recent_charge is None:
            shape = self.geometry
            size = maintenance.SAMPLES * shape.heads * shape.head_dim * shape.dtype.itemsize
            with contextlib.suppress(CapacityError):
                self._recent_charge = IndexCharge(self.store, size)
        return self._recent_charge is not None

    def note_mass(self, mass: float) -> None:
        """Tell which share of the attention to stored entries a step's selection had, 0 to 1.

        When it has clearly fallen since the layout was made, all entries are grouped anew by the
        next W queries.
        """
        if self.config.recluster == "auto" and not self._drifted and self._drift.note(mass):
            self._drifted = True
            self._recent.clear()

    def settle(self) -> None:
        """After a decoding step: move what has left the window to the drives."""
        leaving = len(self.window) - self.config.window
        if leaving < self.config.flush:
            return
        self._adopt_codes()
        self._adopt_layout()
        k, v = self.gather(self.window.slots[:leaving])
        self._write(k, v, None if self.stored is None else self.stored.profile, observed=True)
        self.window.drop_oldest(leaving)
        if self._activity is not None:
            self._activity.resize(len(self.window), leaving)
        stored = self.stored
        if stored is not None and stored.profile is None and stored.entries >= self._quiet_until:
            queries = self._recent.queries(stored.entries + self.config.window)
            self._start_recoding(stored, queries)
            self._start_rewriting(stored, queries if self.config.recluster == "auto" else None)

    # ---- in the background

    def _start_recoding(self, stored: Stored, queries: Queries | None) -> None:
        """Where many keys came after those that codes were fitted to."""
        codebook = stored.index.codebook
        if self._recoding is not None or not recode.due(stored.entries, codebook.trained_on):
            return
        task = recode.Task(
            self.store,
            self.geometry,
            stored.segments,
            stored.entries,
            codebook,
            self.gather(self.window.slots)[0],
            queries,
        )
        job = self.store.background.submit(lambda check: recode.recode(task, check))
        self._recoding = job, stored.entries

    def _adopt_codes(self) -> None:
        """Go by new codes, once they are due; those of keys that came meanwhile are added."""
        stored = self.stored
        if self._recoding is None or stored is None:
            self._recoding = None
            return
        job, entries = self._recoding
        if stored.entries < entries + GRACE * self.config.flush or not job.wait(PATIENCE):
            return
        self._recoding = None
        try:
            codebook, codes = job.result()
            keys, _ = read_entries(
                self.store, self.geometry, stored.segments, entries, stored.entries
            )
            later = codebook.encode(keys)
            index = dataclasses.replace(
                stored.index, codebook=codebook, codes=torch.cat([codes, later], dim=-1)
            )
            charge = IndexCharge(self.store, self._held(index, stored.means))
        except Exception as error:
            self._failed(stored, "codes", error)
            return
        self.stored = dataclasses.replace(stored, index=index, charges=(charge,))

    def _failed(self, stored: Stored, what: str, error: Exception) -> None:
        self._quiet_until = stored.entries + rewrite.MERGED
        self.store.background.failed(f"{self.label} keeps its {what}: {error}")

    def _start_rewriting(self, stored: Stored, queries: Queries | None) -> None:
        """Where tails have piled up or recall has fallen."""
        if self._rewriting is not None:
            return
        first = rewrite.due([segment.entries for segment in stored.segments])
        if self._drifted and self._recent.full:
            first = 0
        if first is None:
            return
        task = self._task(stored, first, queries)
        job = self.store.background.submit(lambda check: rewrite.rewrite(task, check))
        self._rewriting = job, stored.entries + GRACE * self.config.flush

    def _task(self, stored: Stored, first: int, queries: Queries | None) -> rewrite.Task:
        before, segments = stored.segments[:first], stored.segments[first:]
        entries = sum(segment.entries for segment in before)
        clusters = sum(segment.clusters for segment in before)
        lists = [self.store.clusters(segment) for segment in segments]
        offsets, members = concatenated(lists, [segment.entries for segment in segments])
        index = stored.index
        owner = index.owner[clusters:].long()
        part = dataclasses.replace(
            index,
            codes=index.codes[:, :, entries:],
            offsets=offsets,
            members=members,
            limit=index.entries - entries,
            owner=torch.arange(len(owner)).int(),
        )
        return rewrite.Task(
            self.store,
            self.geometry,
            self.label,
            self.selector,
            segments,
            first,
            part,
            torch.where(owner < clusters, -1 - owner, owner - clusters),
            queries,
            None if first > 0 else self._probes_of_stored(part.entries),
        )

    def _adopt_layout(self) -> None:
        """Put what was rewritten in its place, once it is due.

        Whatever went wrong, the old layout is complete and stays.
        """
        stored = self.stored
        if self._rewriting is None or stored is None:
            self._rewriting = None
            return
        job, due = self._rewriting
        if stored.entries < due or not job.wait(PATIENCE):
            return
        self._rewriting = None
        try:
            done = job.result()
            task = done.task
            last = task.first + len(task.segments)
            if stored.segments[task.first : last] != task.segments:
                return  # another layout came first
            segments = (*stored.segments[: task.first], done.segment, *stored.segments[last:])
            index = rewrite.spliced(stored.index, done, segments)
            charge = IndexCharge(self.store, self._held(index, stored.means))
        except Exception as error:
            self._failed(stored, "layout", error)
            return
        if self._activity is not None:
            before = sum(segment.clusters for segment in stored.segments[: task.first])
            replaced = sum(segment.clusters for segment in task.segments)
            self._activity.replace(before, before + replaced, done.segment.clusters)
        if task.first == 0:
            self._drift, self._drifted = Drift(), False
        self.stored = dataclasses.replace(stored, segments=segments, index=index, charges=(charge,))

    def _held(self, index: Index, means: ClusterMeans | None) -> int:
        """Bytes of an index that is not shared with the store, and what belongs to it."""
        activity = 0 if self._activity is None else self._activity.nbytes
        return index.nbytes() + (means.nbytes if means else 0) + activity

    def prepare(self) -> None:
        """Before a decoding step: bring the stored entries into their final layout, once.

        That is due after a prefill in chunks, whose parts were written as they came.
        """
        if self.stored is not None and self.stored.profile is not None:
            self.relay()

    def relay(self) -> None:
        """Read the stored entries back and write them anew: one segment, new codes and clusters.

        Without a profile, or where `dram_bytes` has no room for one layer of the sequence, entries
        stay in the order they came, which costs reads but nothing else.
        """
        stored = self.stored
        if stored is None:
            return
        if self.limit == 0:
            self.stored = None
            return
        try:
            working = IndexCharge(self.store, self.limit * self.geometry.entry_bytes)
        except CapacityError:
            if self.limit < stored.entries:
                raise
            logger.warning(
                "swarm_kv: %s stays unclustered: `dram_bytes` has no room to re-lay it", self.label
            )
            self.stored = dataclasses.replace(stored, profile=None)
            return
        keys, values = self.read_all()
        head, tail = self.gather(self.sinks.slots)[0], self.gather(self.window.slots)[0]
        seen = torch.cat([head, keys, tail], dim=1)
        queries = None
        if stored.profile is not None:
            queries = self._load_profile(stored.profile)
            # Cropped tokens took their queries with them.
            queries = queries.pick(queries.positions < seen.shape[1])
        working.release()
        self._write_first(keys, values, seen, queries)  # the old copy stays until this is complete

    def _write(
        self, k: torch.Tensor, v: torch.Tensor, profile: Profile | None, observed: bool = False
    ) -> None:
        if self.stored is not None and self.limit < self.stored.entries:
            self.relay()  # what a crop left behind must not come back into reach
        if self.stored is None:
            self._write_first(k, v, torch.cat([self.gather(self.sinks.slots)[0], k], 1), None)
        else:
            self._write_more(self.stored, k, v, profile, observed)

    def _write_first(
        self, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, queries: Queries | None
    ) -> None:
        """Write all stored entries anew, in the layout that `queries` ask for.

        Args:
            k, v: [kv_heads, n, head_dim].
            seen: [kv_heads, tokens, head_dim]: keys that the queries see, sinks first, `k` next.
            queries: the profile, or None for token order.
        """
        shape, config = self.geometry, self.config
        stored_bytes = stored_entry_bytes(k, config.codec)
        codebook = train(
            seen[:, len(self.sinks) :],  # the window's too, see `recode.Task`
            config.code_size(shape.head_dim),
            None if queries is None else queries.q,
            config.code_bits,
        )
        codebook = dataclasses.replace(codebook, trained_on=k.shape[1])
        plain = in_sequence(k.shape[1], config.block)
        by_codes = build(
            codebook,
            k,
            plain.offsets,
            plain.members,
            request_cost=config.selection_request_cost(stored_bytes),
        )
        layout = plain
        if queries is not None:
            layout = choose(
                Problem(
                    keys=seen,
                    sinks=len(self.sinks),
                    entries=k.shape[1],
                    queries=queries,
                    scale=shape.scale,
                    stored_bytes=stored_bytes,
                    index=lambda layout: self._indexed(by_codes, k, layout, queries),
                    selector=self.selector,
                    probes=self._probes_of_stored(k.shape[1]),
                ),
                config,
            )
        index = self._indexed(by_codes, k, layout, queries)
        means = None
        if config.estimate_unfetched:
            means = ClusterMeans.build(k, v, *sequence_blocks(k.shape[1], MEANS_BLOCK))
        lists = layout.offsets.nbytes + layout.members.nbytes  # the store holds and counts them
        charge = IndexCharge(self.store, index.nbytes() - lists + (means.nbytes if means else 0))
        segment = self.store.write(
            k,
            v,
            layout.offsets,
            layout.members,
            self.label,
            layout.activations,
            config.initial_fill,
            layout.queries,
            config.codec,
        )
        index = index.laid_out(*self.store.clusters(segment), index.summary)
        if self._activity is not None:
            self._activity.replace(0, len(self._activity.clusters), segment.clusters)
        self._rewriting, self._recoding, self._drift = None, None, Drift()
        # What was written without looking, such as after a crop, is grouped once there are queries.
        self._drifted = (
            queries is None and config.recluster == "auto" and k.shape[1] >= rewrite.MERGED
        )
        self.stored = Stored((segment,), index, (charge,), None, means)
        self.limit = k.shape[1]

    def _probes_of_stored(self, entries: int) -> torch.Tensor | None:
        if self.probes is None:
            return None
        rows = self.probes[len(self.sinks) :][:entries]
        return torch.nn.functional.pad(rows, (0, 0, 0, entries - rows.shape[0]))

    def _indexed(
        self, by_codes: Index, keys: torch.Tensor, layout: Layout, queries: Queries | None
    ) -> Index:
        lists = layout.offsets, layout.members
        if self._summarise is None:
            return by_codes.laid_out(*lists, None)
        asked = None if queries is None else queries.q
        of = Clustered(keys, *lists, layout.activations, asked)
        return by_codes.laid_out(*lists, self._summarise(of, self.config))

    def _write_more(
        self,
        stored: Stored,
        k: torch.Tensor,
        v: torch.Tensor,
        profile: Profile | None,
        observed: bool,
    ) -> None:
        lists, owner = self._parts(stored.index, k, observed)
        recent = self._recent.queries(stored.entries)
        asked = None if recent is None else recent.q
        index = stored.index.grown(Clustered(k, *lists, queries=asked), owner)
        means = stored.means
        if means is not None:
            means = means.grown(k, v, *sequence_blocks(k.shape[1], MEANS_BLOCK))
        more = self._held(index, means) - sum(charge.size for charge in stored.charges)
        charge = IndexCharge(self.store, more)
        segment = self.store.write(
            k,
            v,
            *lists,
            self.label,
            codec=self.config.codec,
            starts=self._next_drives(stored, owner),
        )
        if self._activity is not None:
            self._activity.replace(len(stored.index.owner), len(stored.index.owner), len(owner))
        self.stored = Stored(
            (*stored.segments, segment), index, (*stored.charges, charge), profile, means
        )
        self.limit = self.stored.entries

    def _parts(
        self, index: Index, k: torch.Tensor, observed: bool
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Clusters of entries that are about to be stored, and whose parts they are.

        Args:
            index: of the entries before them.
            k: [kv_heads, n, head_dim].
            observed: whether they are the oldest ones of the window, after decoding steps.
        """
        own = (index.owner == torch.arange(len(index.owner))).nonzero()[:, 0]
        if not observed or own.numel() == 0:
            lists = sequence_blocks(k.shape[1], self.config.block)
            return lists, torch.full((lists[0].numel() - 1,), -1)
        activity = self._activity
        if activity is not None:
            activity.resize(len(self.window))
        medoids = index.members[index.offsets[own].long()].long()
        sizes = index.sizes()[own]
        lot = Lot(
            keys=k,
            bits=None if activity is None else activity.entries[: k.shape[1]],
            cluster_bits=None if activity is None else activity.clusters[own],
            steps=0 if activity is None else activity.steps,
            sizes=sizes,
            medoid_keys=lambda: index.decoded(medoids),
        )
        rows, homes = self._strategy(lot, self.config)
        offsets, members, owner = maintenance.parts(rows, homes, sizes, self.config)
        return (offsets, members), torch.where(owner < 0, -1, own[owner])

    def _next_drives(self, stored: Stored, owner: torch.Tensor) -> torch.Tensor | None:
        """The drive after that of the newest member of each part's cluster; -1 where it is new."""
        if bool((owner < 0).all()):
            return None
        last = torch.cat(
            [
                self.store.drives_of(segment)[self.store.clusters(segment)[0][1:].long() - 1]
                for segment in stored.segments
            ]
        ).int()
        owners = stored.index.owner.long()
        newest = torch.zeros_like(owners).scatter_reduce_(
            0, owners, torch.arange(len(owners)), "amax"
        )
        after = (last[newest[owner]] + 1) % len(self.config.paths)
        return torch.where(owner < 0, -1, after).int()

    def _save_profile(self, queries: Queries) -> Profile:
        shape = self.geometry
        if len(queries) % 2:
            queries = queries.pick(torch.arange(1, len(queries)))
        rows = queries.q.reshape(shape.kv_heads, -1, shape.head_dim).to(shape.dtype)
        half = rows.shape[1] // 2
        clusters = sequence_blocks(half, half or 1)
        segment = self.store.write(
            rows[:, :half], rows[:, half:], *clusters, f"{self.label} profile"
        )
        return Profile(segment, queries.positions, queries.lse)

    def _load_profile(self, profile: Profile) -> Queries:
        half = profile.segment.entries
        shape = self.geometry
        rows = torch.empty(shape.kv_heads, 2 * half, shape.head_dim, dtype=shape.dtype)
        numbers = torch.arange(half, dtype=torch.int64)
        wanted = Wanted((profile.segment,), NOTHING, numbers, half)
        with self.store.fetch([wanted], purpose="stream") as fetch:
            for ((ids, slots),) in fetch.rounds():
                k, v = self.gather(slots)
                rows[:, ids], rows[:, ids + half] = k, v
        q = rows.reshape(shape.heads, -1, shape.head_dim)
        return Queries(q, profile.positions, profile.lse)

    # ---- shrinking

    def crop(self, count: int) -> None:
        """Drop the `count` newest entries."""
        from_window = min(count, len(self.window))
        self.window.drop_newest(from_window)
        if self._activity is not None:
            self._activity.resize(min(len(self._activity.entries), len(self.window)))
        self._recent.crop(len(self) - (count - from_window))
        from_stored = min(count - from_window, self.limit)
        self.limit -= from_stored
        if from_stored:  # what is left will be written anew
            self._rewriting = self._recoding = None
        self.sinks.drop_newest(count - from_window - from_stored)
        if self.limit == 0:
            self.stored = None
