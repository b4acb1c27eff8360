"""opcheck of every operator, torch.compile, gradients, errors and the libraries themselves."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarm_kv import _library, autograd, errors, ops, reference

PACKAGE = Path(ops.__file__).parent

Q = torch.randn(4, 2, 16)
KEYS = torch.randn(2, 40, 16)
CODEBOOKS = torch.randn(2, 4, 8, 4)
CODES = torch.randint(0, 8, (2, 4, 40), dtype=torch.uint8)
PACKED_BOOKS = torch.randn(2, 4, 16, 4)
PACKED = torch.randint(0, 256, (2, 2, 40), dtype=torch.uint8)
NIBBLE_KEYS = torch.randint(0, 256, (2, 40, 8), dtype=torch.uint8)
OFFSETS, MEMBERS = torch.tensor([0, 2, 5, 6]).int(), torch.tensor([0, 1, 1, 2, 3, 5]).int()
BITS = torch.randint(0, 1 << 40, (40, 2))
ROWS = (
    torch.randn(2, 4, 16),
    torch.randn(40 * 64),
    torch.arange(0, 20) * 64,
    torch.tensor([0, 5, 20]),
    2,
    0.25,
)
PARTIALS = (torch.randn(3, 4, 16), torch.randn(3, 4), torch.randn(3, 4, 16), torch.randn(3, 4))

SAMPLES = {
    "activation_signatures": [
        (Q, KEYS, torch.tensor([38, 39]), 0.1, 4, 1, 0.25, None, "mean"),
        (Q.half(), KEYS, torch.tensor([38, 39]), 0.1, 4, 1, 0.25, torch.rand(4, 2), "union"),
    ],
    "cluster": [
        (BITS, name, "jaccard", 0.9, 8, 3, 1, "coded", 16, 0, 0)
        for name in ("swarm", "no_replica", "medoid_only", "hypergraph", "sequence_blocks")
    ],
    "join_clusters": [(BITS, BITS[:7], 128, name, 0.9, 2) for name in ("jaccard", "global")],
    "score_codes": [
        (Q, CODEBOOKS, CODES, 0.25),
        (Q.half(), CODEBOOKS, CODES, 0.25, torch.rand(2, 16, 16)),
    ],
    "score_packed_codes": [
        (Q, PACKED_BOOKS, PACKED, 0.25),
        (Q, PACKED_BOOKS, PACKED, 0.25, torch.rand(2, 16, 16).half()),
        (Q.half(), PACKED_BOOKS, PACKED.transpose(1, 2).contiguous().transpose(1, 2), 0.25),
    ],
    "score_clusters": [(Q, KEYS, 0.25), (Q.bfloat16(), KEYS, 0.25)],
    "score_coded_clusters": [(Q, NIBBLE_KEYS, torch.rand(2, 16), 0.25)],
    "select_clusters": [(torch.rand(3), OFFSETS, MEMBERS, 3)],
    "select_intervals": [
        (torch.rand(6), MEMBERS, 3, 1.5),
        (torch.rand(6).half(), MEMBERS.flip(0), 3, 0.0),
    ],
    "select_two_level": [(torch.rand(6), OFFSETS, MEMBERS, 4, 1.5, 0.25)],
    "sparse_attention": [
        ROWS,
        (ROWS[0].half(), ROWS[1].half(), *ROWS[2:], torch.randn(4).half(), 30.0),
        (ROWS[0].double(), ROWS[1].double(), *ROWS[2:], None, None),
    ],
    "merge_attention": [PARTIALS, tuple(x.double() for x in PARTIALS)],
}
CASES = [(name, args) for name, samples in SAMPLES.items() for args in samples]
FLOATING_OPS = [name for name in SAMPLES if not name.startswith(("cluster", "join", "select"))]
REFUSING_OPS = [name for name in SAMPLES if name in autograd.WITHOUT_BACKWARD]


def test_every_operator_has_samples_reference_and_docstring():
    assert set(SAMPLES) == set(ops.__all__)
    for name in ops.__all__:
        assert callable(getattr(reference, name))
        text = getattr(ops, name).__doc__
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in text


@pytest.mark.parametrize(("name", "args"), CASES)
def test_opcheck(name, args):
    torch.library.opcheck(getattr(torch.ops.swarm_kv, name).default, args)


@pytest.mark.parametrize(("name", "args"), [case for case in CASES if case[0] in FLOATING_OPS])
def test_fake_matches_real(name, args):
    """Shapes and dtypes that a fake kernel predicts, where the data does not decide them."""
    real = getattr(ops, name)(*args)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        fake = getattr(torch.ops.swarm_kv, name)(*args)
    for r, f in zip(
        [real] if isinstance(real, torch.Tensor) else real,
        [fake] if isinstance(fake, torch.Tensor) else fake,
        strict=True,
    ):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.parametrize("name", FLOATING_OPS)
def test_fake_kernel_checks_too(name):
    args = list(SAMPLES[name][0])
    args[0] = args[0].to(torch.int32)
    with (
        torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=f"{name}: .* must be one of"),
    ):
        getattr(torch.ops.swarm_kv, name)(*args)


@pytest.mark.parametrize("name", REFUSING_OPS)
def test_gradients_are_refused_not_dropped(name):
    args = list(SAMPLES[name][0])
    args[0] = args[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"swarm_kv::{name} has no backward"):
        getattr(ops, name)(*args)
    with torch.no_grad():
        getattr(ops, name)(*args)


def test_compiles_without_graph_break():
    def step(q, pool, slots, row_offsets):
        out, lse = ops.sparse_attention(q, pool, slots, row_offsets, 2, 0.25)
        return ops.merge_attention(out * 2, lse, out, lse)[0] + 1

    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*ROWS[:4]), step(*ROWS[:4]))


def test_direct_calls_name_the_class():
    with pytest.raises(RuntimeError, match=r"^\[swarm_kv.ArgumentError\] select_clusters: budget"):
        torch.ops.swarm_kv.select_clusters(torch.rand(3), OFFSETS, MEMBERS, -1)


def test_typed_errors():
    with pytest.raises(errors.ArgumentError) as caught:
        ops.select_clusters(torch.rand(3), OFFSETS, MEMBERS, -1)
    assert str(caught.value) == "select_clusters: budget must not be negative, got -1"
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, errors.SwarmError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("text", "cls", "message"),
    [
        ("[swarm_kv.StorageError] drive 1: EIO", errors.StorageError, "drive 1: EIO"),
        ("[swarm_kv.CapacityError] full", errors.CapacityError, "full"),
        ("[swarm_kv.StateError] closed", errors.StateError, "closed"),
        ("[swarm_kv.NewerError] x", errors.SwarmError, "x"),
        (
            "[swarm_kv.StorageError] two\nlines\nException raised from f at g.cpp:1 (most recent",
            errors.StorageError,
            "two\nlines",
        ),
        (
            "[swarm_kv.StateError] x\nC++ CapturedTraceback:\n#4 std::function",
            errors.StateError,
            "x",
        ),
    ],
)
def test_convert(text, cls, message):
    converted = errors.convert(RuntimeError(text))
    assert type(converted) is cls
    assert str(converted) == message


def test_convert_leaves_other_errors_alone():
    for error in (RuntimeError("shape mismatch"), errors.StateError("[swarm_kv.StorageError] x")):
        assert errors.convert(error) is error

    @errors.typed_errors
    def fails():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else") as caught:
        fails()
    assert not isinstance(caught.value, errors.SwarmError)


def test_integer_arguments_of_the_wrong_type_are_refused_by_torch():
    with pytest.raises((RuntimeError, TypeError), match="budget"):
        ops.select_clusters(torch.rand(3), OFFSETS, MEMBERS, 1.5)


def needed_libraries(path):
    result = subprocess.run(
        ["readelf", "--dynamic", str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", result.stdout))


def undefined_symbols(path):
    result = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(re.findall(r" U (\w+)", result.stdout))


needs_binutils = pytest.mark.skipif(
    shutil.which("readelf") is None or shutil.which("nm") is None, reason="needs binutils"
)


@needs_binutils
@pytest.mark.parametrize("name", ["_C.so", "_C_cuda.so"])
def test_libraries_use_the_stable_abi_only(name):
    path = PACKAGE / name
    if not path.exists():
        pytest.skip(f"{name} was not built")
    assert not any("python" in library for library in needed_libraries(path))
    symbols = undefined_symbols(path)
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    unstable = [s for s in symbols if s.startswith("Py") or re.match(r"_ZNK?(2at|3c10|5torch)", s)]
    assert unstable == []


@needs_binutils
def test_cpu_library_does_not_need_cuda():
    needed = needed_libraries(PACKAGE / "_C.so")
    assert needed
    assert not any("cuda" in library for library in needed)


def test_cuda_status_gives_a_reason():
    status = _library.cuda_status()
    assert status.loaded == (status.reason == "")
    if torch.version.cuda is None:
        assert not status.loaded
        assert "without CUDA" in status.reason


@pytest.mark.parametrize(
    "name",
    [
        "activation_signatures",
        "decode_entries",
        "device_open",
        "gather_entries",
        "merge_attention",
        "score_clusters",
        "score_coded_clusters",
        "score_codes",
        "score_packed_codes",
        "select_clusters",
        "select_two_level",
        "sparse_attention",
    ],
)
def test_cuda_kernel_is_registered_when_loaded(name):
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"swarm_kv::{name}", "CUDA")
    assert registered == _library.cuda_status().loaded
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"swarm_kv::{name}", "CPU")


def test_missing_library_says_how_to_build(tmp_path):
    package = tmp_path / "swarm_kv"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PACKAGE / "_library.py", package)
    result = subprocess.run(
        [sys.executable, "-c", "import swarm_kv._library"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode != 0
    assert "pip install -e . --no-build-isolation" in result.stderr
