"""encode_entries and decode_entries: against their reference and a store, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_kv import reference
from swarm_kv.config import _CHOICES
from swarm_kv.errors import ArgumentError
from swarm_kv.store_ops import decode_entries, encode_entries, stored_entry_bytes

from .helpers import Data, assert_holds, blocks, fetch_all, open_store

pytestmark = pytest.mark.timeout(120)

OPS = torch.ops.swarm_kv
CODECS = [name for name in _CHOICES["codec"] if name != "none"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORMS = [(1, 64), (2, 16), (3, 5), (2, 33), (1, 1), (8, 128)]
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def entries(
    count: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values, a few key channels being large and far from 0, as keys of models have."""
    data = Data.random(count, kv_heads, dim, seed=seed)
    channels = torch.arange(dim) % 16 == 3
    return (data.k + 20 * channels).to(dtype), data.v.to(dtype)


def scattered(codes: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Memory in which codes [n, bytes] begin anywhere, and where."""
    count, size = codes.shape
    generator = torch.Generator().manual_seed(seed)
    step = size + int(torch.randint(4, (), generator=generator))
    slots = 1 + step * torch.randperm(count, generator=generator)
    memory = torch.randint(256, (count * step + 9,), generator=generator, dtype=torch.uint8)
    memory[slots[:, None] + torch.arange(size)] = codes
    return memory, slots


def code_bytes(codec: str, kv_heads: int, dim: int) -> int:
    return stored_entry_bytes(torch.empty(kv_heads, 0, dim), codec)


def assert_near(got: Tensor, expected: Tensor) -> None:
    bound = ROUNDING[got.dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim"), FORMS)
def test_decoding_equals_the_reference(
    codec: str, dtype: torch.dtype, kv_heads: int, dim: int
) -> None:
    codes, channels = encode_entries(*entries(70, kv_heads, dim, dtype), codec)
    memory, slots = scattered(codes)
    got = decode_entries(memory, slots, codec, kv_heads, dim, dtype, channels)
    assert got.shape == (70, 2 * kv_heads * dim)
    assert got.dtype == dtype
    expected = reference.decode_entries(memory, slots, codec, kv_heads, dim, dtype, channels)
    if codec == "int8":
        assert torch.equal(got, expected)  # the product of 7 and 11 bits is exact
    assert_near(got, expected)
    # Control: the code beside it is another entry.
    others = decode_entries(memory, slots.roll(1), codec, kv_heads, dim, dtype, channels)
    assert torch.equal(others, got.roll(1, 0))
    assert not torch.equal(others, got)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("kv_heads", "dim"), [form for form in FORMS if form != (1, 1)])
def test_encoding_equals_the_reference(
    codec: str, dtype: torch.dtype, kv_heads: int, dim: int
) -> None:
    k, v = entries(70, kv_heads, dim, dtype)
    codes, channels = encode_entries(k, v, codec)
    assert codes.shape == (70, stored_entry_bytes(k, codec))
    expected, expected_channels = reference.encode_entries(k, v, codec)
    torch.testing.assert_close(channels, expected_channels, rtol=1e-5, atol=1e-6)
    assert codes.shape == expected.shape
    # A number halfway between two levels may take either.
    assert (codes != expected).float().mean() < 0.01
    assert (codes != reference.encode_entries(v, k, codec)[0]).float().mean() > 0.3


@pytest.mark.parametrize(("codec", "least", "most"), [("int8", 1e-4, 0.02), ("kivi4", 1e-2, 0.12)])
def test_rounding_is_what_is_lost(codec: str, least: float, most: float) -> None:
    k, v = entries(200, 2, 64)
    codes, channels = encode_entries(k, v, codec)
    slots = torch.arange(200) * codes.shape[1]
    got = decode_entries(codes.flatten(), slots, codec, 2, 64, torch.float32, channels)
    keys, values = got.view(200, 2, 2, 64).permute(1, 2, 0, 3)
    assert least < (values - v).norm() / v.norm() < most
    spread = k - k.mean(1, keepdim=True)
    assert (keys - k).norm() / spread.norm() < (most if codec == "kivi4" else 10 * most)


@pytest.mark.parametrize("codec", CODECS)
def test_the_end_of_the_range_stays_in_it(codec: str) -> None:
    """int8's step for 65504 is rounded up, and so are what kivi4 adds up."""
    limit = torch.finfo(torch.float16).max
    k, v = entries(40, 1, 64, torch.float16)
    v[:, :, ::2], v[:, :, 1::2] = limit, -limit
    codes, channels = encode_entries(k, v, codec)
    slots = torch.arange(40) * codes.shape[1]
    wide = decode_entries(codes.flatten(), slots, codec, 1, 64, torch.float32, channels)
    got = decode_entries(codes.flatten(), slots, codec, 1, 64, torch.float16, channels)
    assert wide.abs().max() > limit  # control: without a limit it would be infinite
    assert torch.equal(got[:, 64:].abs(), torch.full((40, 64), limit, dtype=torch.float16))


@settings(max_examples=100, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 5),
    dim=st.integers(1, 70),
    count=st.integers(0, 80),
    seed=st.integers(0, 1000),
)
def test_any_bytes_decode_as_in_the_reference(
    codec: str, dtype: torch.dtype, kv_heads: int, dim: int, count: int, seed: int
) -> None:
    """Scales that are NaN, infinite, negative or subnormal among them."""
    generator = torch.Generator().manual_seed(seed)
    size = code_bytes(codec, kv_heads, dim)
    memory = torch.randint(256, (size + 700,), generator=generator, dtype=torch.uint8)
    slots = torch.randint(701, (count,), generator=generator)
    channels = None
    if codec == "kivi4":
        channels = torch.randn(2, kv_heads, dim, generator=generator).abs()
    arguments = memory, slots, codec, kv_heads, dim, dtype, channels
    assert_near(decode_entries(*arguments), reference.decode_entries(*arguments))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_gives_back_the_same(codec: str, dtype: torch.dtype, drives: list[str]) -> None:
    data = Data.random(60, 2, 40, dtype)
    codes, channels = encode_entries(data.k, data.v, codec)
    memory, slots = scattered(codes)
    rows = decode_entries(memory, slots, codec, 2, 40, dtype, channels)
    store = open_store(drives)
    segment = store.write(data.k, data.v, *blocks(60), "layer 0", codec=codec)
    got = fetch_all(store, segment, data, entries=torch.arange(60))
    assert_holds(got, rows, range(60))
    with pytest.raises(AssertionError):  # the control: what was written is not what comes back
        assert_holds(got, data.rows(), range(60))


@pytest.mark.parametrize("codec", CODECS)
def test_a_byte_of_a_code_is_of_one_entry(codec: str) -> None:
    codes, channels = encode_entries(*entries(9, 2, 16), codec)
    slots = torch.arange(9) * codes.shape[1]
    before = decode_entries(codes.flatten(), slots, codec, 2, 16, torch.float32, channels)
    codes[4, -1] ^= 0x30
    after = decode_entries(codes.flatten(), slots, codec, 2, 16, torch.float32, channels)
    assert (before != after).any(1).nonzero().flatten().tolist() == [4]


def test_channels_are_of_keys() -> None:
    codes, channels = encode_entries(*entries(9, 2, 16), "kivi4")
    arguments = codes.flatten(), torch.arange(9) * codes.shape[1], "kivi4", 2, 16, torch.float32
    right, other = decode_entries(*arguments, channels), decode_entries(*arguments, channels + 1)
    assert (right != other)[:, :32].all()
    assert torch.equal(right[:, 32:], other[:, 32:])


@pytest.mark.parametrize("codec", CODECS)
def test_strided_arguments_and_no_entries(codec: str) -> None:
    k, v = entries(30, 2, 16)
    codes, channels = encode_entries(k, v, codec)
    spread_k, spread_v = (x.mT.contiguous().mT for x in (k, v))
    again, its_channels = encode_entries(spread_k, spread_v, codec)
    assert torch.equal(again, codes)
    assert torch.equal(its_channels, channels)
    slots = torch.arange(30) * codes.shape[1]
    form = codec, 2, 16, torch.float16
    rows = decode_entries(codes.flatten(), slots, *form, channels)
    pairs = torch.stack([slots, -slots], 1)
    loose = channels.mT.contiguous().mT
    assert torch.equal(decode_entries(codes.flatten(), pairs[:, 0], *form, loose), rows)

    nothing, of_nothing = encode_entries(k[:, :0], v[:, :0], codec)
    assert nothing.shape == (0, codes.shape[1])
    assert of_nothing.shape == channels.shape
    assert not of_nothing.isnan().any()
    empty = decode_entries(nothing.flatten(), slots[:0], *form, of_nothing)
    assert empty.shape == (0, 64)


# ---- what is registered


@pytest.mark.parametrize("codec", CODECS)
def test_opcheck(codec: str) -> None:
    k, v = entries(7, 2, 16)
    torch.library.opcheck(OPS.encode_entries.default, (k, v, codec))
    codes, channels = encode_entries(k, v, codec)
    slots = torch.arange(7) * codes.shape[1]
    for dtype in DTYPES:
        arguments = codes.flatten(), slots, codec, 2, 16, dtype, channels
        torch.library.opcheck(OPS.decode_entries.default, arguments)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 16), (3, 5)])
def test_compiled_code_knows_the_shapes(codec: str, kv_heads: int, dim: int) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(k: Tensor, v: Tensor) -> Tensor:
        codes, channels = OPS.encode_entries(k, v, codec)
        slots = torch.arange(codes.shape[0]) * codes.shape[1]
        rows = OPS.decode_entries(
            codes.flatten(), slots, codec, kv_heads, dim, torch.float32, channels
        )
        return rows + 0.0

    k, v = entries(5, kv_heads, dim)
    codes, channels = encode_entries(k, v, codec)
    slots = torch.arange(5) * codes.shape[1]
    rows = decode_entries(codes.flatten(), slots, codec, kv_heads, dim, torch.float32, channels)
    assert torch.equal(there_and_back(k, v), rows)


def test_fake_kernels_check_the_codec_and_shapes() -> None:
    k, v = entries(5, 2, 16)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(RuntimeError, match="encode_entries: unknown codec 'zip'"):
            OPS.encode_entries(k, v, "zip")
        with pytest.raises(RuntimeError, match=r"encode_entries: k is .* but v is"):
            OPS.encode_entries(k, v[:, 1:], "int8")


def test_gradients_are_refused() -> None:
    k, v = entries(5, 2, 16)
    codes, channels = encode_entries(k, v, "kivi4")
    with pytest.raises(NotImplementedError, match="swarm_kv::encode_entries has no backward"):
        encode_entries(k.requires_grad_(), v, "kivi4")
    arguments = codes.flatten(), torch.tensor([0]), "kivi4", 2, 16, torch.float32
    with pytest.raises(NotImplementedError, match="swarm_kv::decode_entries has no backward"):
        decode_entries(*arguments, channels.requires_grad_())
    with torch.no_grad():
        decode_entries(*arguments, channels)


# ---- bad input


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"codes": torch.zeros(2, 60, dtype=torch.uint8)},
            "codes must have 1 dimensions, got uint8 [2, 60]",
        ),
        ({"codes": torch.zeros(120)}, "codes must be uint8, got float32 [120]"),
        ({"codes": torch.zeros(240, dtype=torch.uint8)[::2]}, "`codes` must be contiguous"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots must be int64, got int32 [2]"),
        ({"slots": torch.zeros(2, 1).long()}, "slots must have 1 dimensions, got int64 [2, 1]"),
        ({"slots": torch.tensor([0, 81])}, "slot 81 is outside [0, 80]"),
        ({"slots": torch.tensor([-1])}, "slot -1 is outside [0, 80]"),
        ({"codes": torch.zeros(39, dtype=torch.uint8)}, "slot 0 is outside [0, -1]"),
        ({"codec": "zip"}, 'unknown `codec` "zip"; choose one of: int8, kivi4'),
        ({"codec": ""}, 'unknown `codec` ""; choose one of: int8, kivi4'),
        (
            {"codec": "none"},
            '`codec` "none" leaves entries as they are; gather_entries copies such',
        ),
        (
            {"kv_heads": 0},
            "`kv_heads` and `head_dim` must be positive and their product at most 1048576, "
            "got 0 and 16",
        ),
        (
            {"head_dim": -16},
            "`kv_heads` and `head_dim` must be positive and their product at most 1048576, "
            "got 2 and -16",
        ),
        (
            {"kv_heads": 1 << 62, "head_dim": 1 << 62},
            "`kv_heads` and `head_dim` must be positive and their product at most 1048576, "
            f"got {1 << 62} and {1 << 62}",
        ),
        (
            {"dtype": torch.float64},
            "`dtype` must be float16, bfloat16 or float32, got float64; codes hold no more than "
            "float32",
        ),
        (
            {"dtype": torch.int32},
            "`dtype` must be float16, bfloat16 or float32, got int32; codes hold no more than "
            "float32",
        ),
        (
            {"channels": None},
            '`codec` "kivi4" needs the `channels` that encode_entries returned with the codes',
        ),
        (
            {"channels": torch.zeros(64)},
            "channels must have 3 dimensions, got float32 [64]",
        ),
        (
            {"channels": torch.zeros(2, 2, 16, dtype=torch.float64)},
            "channels must be float32, got float64 [2, 2, 16]",
        ),
        (
            {"channels": torch.zeros(0, 2, 16)},
            "channels must have means and deviations = 2 in dimension 0, got float32 [0, 2, 16]",
        ),
        (
            {"channels": torch.zeros(2, 3, 16)},
            "channels must have kv_heads = 2 in dimension 1, got float32 [2, 3, 16]",
        ),
        (
            {"head_dim": 15},
            "channels must have head_dim = 15 in dimension 2, got float32 [2, 2, 16]",
        ),
        ({"codec": "int8"}, '`codec` "int8" takes no `channels`, got float32 [2, 2, 16]'),
    ],
)
def test_decode_errors(change: dict[str, Any], text: str) -> None:
    good = {
        "codes": torch.zeros(120, dtype=torch.uint8),
        "slots": torch.tensor([0, 80]),
        "codec": "kivi4",
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": torch.float32,
        "channels": torch.zeros(2, 2, 16),
    }
    decode_entries(**good)
    with pytest.raises(ArgumentError) as caught:
        decode_entries(**{**good, **change})
    assert str(caught.value) == f"decode_entries: {text}"


K = torch.zeros(2, 5, 16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": K[0]}, "encode_entries: k must have 3 dimensions, got float32 [5, 16]"),
        (
            {"k": K.int(), "v": K.int()},
            "encode_entries: k must be float16, bfloat16, float32 or float64, got int32 [2, 5, 16]",
        ),
        ({"v": K.half()}, "encode_entries: v must be float32, got float16 [2, 5, 16]"),
        (
            {"v": K[:, 1:]},
            "encode_entries: `k` is float32 [2, 5, 16] but `v` is float32 [2, 4, 16]; both hold "
            "[kv_heads, entries, head_dim]",
        ),
        ({"codec": "zip"}, 'encode_entries: unknown `codec` "zip"; choose one of: int8, kivi4'),
        (
            {"codec": "none"},
            'encode_entries: `codec` "none" leaves entries as they are; gather_entries copies such',
        ),
        (
            {"v": K + float("nan")},
            'codec "int8": keys or values hold NaN or infinity; use codec "none"',
        ),
        (
            {"k": K + 7e4},
            'codec "int8": a key or value is beyond 65504, which its scales cannot hold; '
            'use codec "none"',
        ),
    ],
)
def test_encode_errors(change: dict[str, Any], text: str) -> None:
    good = {"k": K, "v": K, "codec": "int8"}
    encode_entries(**good)
    with pytest.raises(ArgumentError) as caught:
        encode_entries(**{**good, **change})
    assert str(caught.value) == text
