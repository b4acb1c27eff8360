"""The operators that reach the drives: their fake kernels, and what brings entries out of memory.

Schemas stand in csrc/ops/*_ops.cpp. `swarm_kv.store` wraps them in objects that give back what they
hold; a loop of your own may call them directly:

| operator | in -> out |
|---|---|
| `store_open` | paths and settings -> handle |
| `store_pool` | handle -> uint8 view of all entries in fast memory |
| `window_append`, `window_retain`, `window_release` | k, v [kv_heads, n, dim] -> slots int64 [n] |
| `segment_write`, `segment_free` | k, v, clusters -> handle of what lies on the drives |
| `segment_clusters`, `segment_drives` | handle -> its clusters, and the drive of each copy |
| `fetch_submit` | segments, clusters, entries of B rows -> ticket, and what is in fast memory |
| `fetch_wait`, `fetch_release` | ticket -> entry numbers and slots by row, whether more follows |
| `fetch_attend` | what `fetch_submit` takes, and queries -> attention to all of it, as it arrives |
| `device_open`, `store_attach` | any tensor of a device -> handle; a store attends there |
| `store_charge`, `store_stats`, `store_notes`, `store_close` | accounting and the end |
| `gather_entries` | pool, slots -> entries side by side |
| `encode_entries`, `decode_entries` | k, v -> codes, as drives hold them; codes, slots -> entries |

A slot is a byte offset in the pool; `sparse_attention` and `gather_entries` take element offsets,
`decode_entries` byte offsets in the codes.

`fetch_attend` is a decoding step's submit, attend, complete, attend and merge in one call. Row r of
the batch has `queries[r]` of the rows of q [Q, Hq, D], and `own` (slots, `own_rows` offsets) beside
what it wants of the drives: sinks and window, its queries' own tokens last, of which query i of n
sees all but the last n - 1 - i. `visible`, bool [sum of limits], leaves stored entries out of
attention. It returns out and lse as `sparse_attention` does, the numbers of the stored entries that
were fetched (`ids`, `rows` offsets), and the seconds that submitting and waiting took. Whether it
succeeds or not, nothing is held afterwards. With q on the device that the store was attached to,
attention runs there: what it reads is copied in batches, and out and lse are there. What
`device_open` returns is good for one `store_attach`.

In compiled code (`torch.compile`) these calls happen in the order in which they stand, used or not.
Where a call gives or takes a handle that is made in the same function (`store_open`,
`segment_write`, `fetch_submit`, `fetch_wait`), the compiler breaks the graph. It does not know that
`sparse_attention` and `gather_entries` read memory which a release gives to others: keep
`window_release`, `segment_free` and `fetch_release` out of compiled functions that attend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from . import _library  # noqa: F401  (loads the operators)
from .dense import accumulation_dtype
from .errors import typed_errors

__all__ = ["decode_entries", "encode_entries", "gather_entries", "stored_entry_bytes"]


@typed_errors
def gather_entries(pool: Tensor, slots: Tensor, entry_elements: int) -> Tensor:
    """Copies entries out of the pool.

    Args:
        pool: [P] floating, contiguous. With slots on a CUDA device: there, or in pinned memory.
        slots: [n] int64, element offset of each entry.
        entry_elements: numbers per entry, > 0.

    Returns:
        [n, entry_elements] on the device of slots, row i being `pool[slots[i] : slots[i] +
        entry_elements]`; on a CUDA device a row is NaN whose slot reaches past the pool.

    Raises:
        ArgumentError: a shape or dtype is wrong, or a slot reaches past the pool.
    """
    return torch.ops.swarm_kv.gather_entries(pool, slots, entry_elements)


@typed_errors
def stored_entry_bytes(k: Tensor, codec: str) -> int:
    """Bytes that one entry takes on a drive.

    Args:
        k: [kv_heads, n, head_dim] floating, keys of any number of entries: only its form matters.
        codec: form of entries on the drives, see csrc/core/codec.h.

    Raises:
        ArgumentError: unknown codec; the message lists the known ones.
    """
    size: int = torch.ops.swarm_kv.stored_entry_bytes(k, codec)
    return size


@typed_errors
def encode_entries(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Writes entries in a codec, as a store writes them to its drives. On the CPU.

    Args:
        k: [kv_heads, n, head_dim] floating, keys.
        v: like k.
        codec: `int8` or `kivi4`, see csrc/core/codec.h.

    Returns:
        codes: uint8 [n, `stored_entry_bytes(k, codec)`].
        channels: float32 [2, kv_heads, head_dim] with `kivi4`, the mean of each key channel over
            the n entries and its deviation, which `decode_entries` needs; [0, kv_heads, head_dim]
            with `int8`.

    Raises:
        ArgumentError: a shape or dtype is wrong, unknown codec, or numbers that it cannot hold:
            NaN, infinity, or beyond 65504.
    """
    codes, channels = torch.ops.swarm_kv.encode_entries(k, v, codec)
    return codes, channels


@typed_errors
def decode_entries(
    codes: Tensor,
    slots: Tensor,
    codec: str,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    channels: Tensor | None = None,
) -> Tensor:
    """Copies entries out of memory that holds their codes, and decodes them.

    A code is `stored_entry_bytes` long; it may begin at any byte.

    Args:
        codes: [bytes] uint8, contiguous. With slots on a CUDA device: there, or in pinned memory.
        slots: [n] int64, the element of `codes` at which each code begins.
        codec: the one that they were encoded with.
        kv_heads: > 0.
        head_dim: > 0. On a CUDA device a code is at most 96 KiB long.
        dtype: of the result: float16, bfloat16 or float32. What was encoded may have had another.
        channels: what `encode_entries` returned with the codes, on the device of slots; may be left
            out with `int8`.

    Returns:
        [n, 2 * kv_heads * head_dim] of dtype on the device of slots, row i being entry i as [K |
        V]; on a CUDA device a row is NaN whose slot reaches past the codes.

    Raises:
        ArgumentError: a shape or dtype is wrong, unknown codec, no channels where the codec needs
            them, or a slot reaches past the codes.
    """
    rows: Tensor = torch.ops.swarm_kv.decode_entries(
        codes, slots, codec, kv_heads, head_dim, dtype, channels
    )
    return rows


# The compiler removes calls whose results are not used and moves calls that share no tensor, unless
# it is told that they do something. A registered effect is a token that passes from call to call.
EFFECTFUL = (
    "device_open",
    "store_open",
    "store_close",
    "store_set_entry_bytes",
    "store_charge",
    "store_attach",
    "window_append",
    "window_retain",
    "window_release",
    "segment_write",
    "segment_free",
    "fetch_submit",
    "fetch_wait",
    "fetch_release",
    "fetch_attend",
)
for _name in EFFECTFUL:
    _op = getattr(torch.ops.swarm_kv, _name).default
    has_side_effect(_op)
    _register_effectful_op(_op, _EffectType.ORDERED)


# ---- Fake kernels: shapes and dtypes while tracing, when no store may be touched.

NO_HANDLE = 0
"""What a handle is while tracing. No store, segment or ticket has it, so that a graph which kept
the number fails with a StateError instead of reaching another one."""


def _list_of_unknown_length() -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.int64)


def _check_keys_values(op: str, k: Tensor, v: Tensor) -> None:
    torch._check(k.dim() == 3, lambda: f"{op}: k must have 3 dimensions, got {k.dim()}")
    torch._check(v.dtype == k.dtype, lambda: f"{op}: v must be {k.dtype}, got {v.dtype}")
    torch._check(v.shape == k.shape, lambda: f"{op}: k is {k.shape} but v is {v.shape}")


@torch.library.register_fake("swarm_kv::gather_entries")
def _(pool: Tensor, slots: Tensor, entry_elements: int) -> Tensor:
    return slots.new_empty((slots.shape[0], entry_elements), dtype=pool.dtype)


@torch.library.register_fake("swarm_kv::encode_entries")
def _(k: Tensor, v: Tensor, codec: str) -> Any:
    _check_keys_values("encode_entries", k, v)
    kv_heads, entries, head_dim = k.shape
    torch._check(codec in ("int8", "kivi4"), lambda: f"encode_entries: unknown codec {codec!r}")
    if codec == "int8":
        parts, size = 0, 2 * kv_heads * (2 + head_dim)
    else:
        parts, size = 2, 2 * 20 * ((kv_heads * head_dim + 31) // 32)
    codes = torch.empty(entries, size, dtype=torch.uint8)
    return codes, torch.empty(parts, kv_heads, head_dim)


@torch.library.register_fake("swarm_kv::decode_entries")
def _(
    codes: Tensor,
    slots: Tensor,
    codec: str,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    channels: Tensor | None = None,
) -> Tensor:
    return slots.new_empty((slots.shape[0], 2 * kv_heads * head_dim), dtype=dtype)


@torch.library.register_fake("swarm_kv::store_open")
def _(*settings: Any) -> int:
    return NO_HANDLE


@torch.library.register_fake("swarm_kv::store_close")
def _(store: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::store_set_entry_bytes")
def _(store: int, entry_bytes: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::store_pool")
def _(store: int) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.uint8)


@torch.library.register_fake("swarm_kv::store_charge")
def _(store: int, bytes: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::device_open")
def _(like: Tensor) -> Tensor:
    return torch.empty(16, dtype=torch.uint8)


@torch.library.register_fake("swarm_kv::store_attach")
def _(store: int, device: Tensor, hbm_bytes: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::store_stats")
def _(store: int) -> str:
    return "{}"


@torch.library.register_fake("swarm_kv::store_notes")
def _(store: int) -> str:
    return ""


@torch.library.register_fake("swarm_kv::window_append")
def _(store: int, k: Tensor, v: Tensor) -> Tensor:
    _check_keys_values("window_append", k, v)
    return torch.empty(k.shape[1], dtype=torch.int64)


@torch.library.register_fake("swarm_kv::window_retain")
def _(store: int, slots: Tensor) -> None:
    return None


@torch.library.register_fake("swarm_kv::window_release")
def _(store: int, slots: Tensor) -> None:
    return None


@torch.library.register_fake("swarm_kv::segment_clusters")
def _(store: int, segment: int) -> tuple[Tensor, Tensor]:
    return _list_of_unknown_length().int(), _list_of_unknown_length().int()


@torch.library.register_fake("swarm_kv::segment_drives")
def _(store: int, segment: int) -> Tensor:
    return _list_of_unknown_length().to(torch.uint8)


@torch.library.register_fake("swarm_kv::stored_entry_bytes")
def _(k: Tensor, codec: str) -> int:
    torch._check(k.dim() == 3, lambda: f"stored_entry_bytes: k must have 3 dimensions: {k.dim()}")
    return NO_HANDLE


@torch.library.register_fake("swarm_kv::segment_write")
def _(
    store: int,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    members: Tensor,
    label: str,
    activations: Tensor | None = None,
    initial_fill: str = "none",
    profile_queries: int = 0,
    codec: str = "none",
    starts: Tensor | None = None,
) -> int:
    _check_keys_values("segment_write", k, v)
    return NO_HANDLE


@torch.library.register_fake("swarm_kv::segment_free")
def _(store: int, segment: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::fetch_submit")
def _(
    store: int,
    segments: list[int],
    segment_rows: list[int],
    clusters: Tensor,
    cluster_rows: Tensor,
    entries: Tensor,
    entry_rows: Tensor,
    limits: list[int],
    purpose: str,
    ahead: int,
) -> Any:
    offsets = len(limits) + 1
    torch._check(
        cluster_rows.shape[0] == entry_rows.shape[0] == offsets,
        lambda: f"fetch_submit: {len(limits)} rows need {offsets} offsets",
    )
    ids = _list_of_unknown_length()
    return NO_HANDLE, ids, torch.empty_like(ids), torch.empty_like(cluster_rows)


@torch.library.register_fake("swarm_kv::fetch_wait")
def _(store: int, ticket: int) -> Any:
    ids = _list_of_unknown_length()
    return ids, torch.empty_like(ids), _list_of_unknown_length(), False


@torch.library.register_fake("swarm_kv::fetch_release")
def _(store: int, ticket: int) -> None:
    return None


@torch.library.register_fake("swarm_kv::fetch_attend")
def _(
    store: int,
    segments: list[int],
    segment_rows: list[int],
    clusters: Tensor,
    cluster_rows: Tensor,
    entries: Tensor,
    entry_rows: Tensor,
    limits: list[int],
    ahead: int,
    q: Tensor,
    queries: list[int],
    own: Tensor,
    own_rows: list[int],
    kv_heads: int,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Any:
    torch._check(q.dim() == 3, lambda: f"fetch_attend: q must have 3 dimensions, got {q.dim()}")
    out = torch.empty_like(q, dtype=accumulation_dtype(q.dtype)).contiguous()
    ids = _list_of_unknown_length()
    return out, out.new_empty(q.shape[:2]), ids, torch.empty_like(cluster_rows), 0.0, 0.0
