"""What setup.py says when it cannot build. Every case ends before anything is compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree"),
    pytest.mark.timeout(120),
]


def build(tmp_path, **env):
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def assert_stopped(result, *texts):
    assert result.returncode != 0
    for text in texts:
        assert text in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_missing_system_headers_are_named_with_their_packages(tmp_path):
    result = build(tmp_path, SWARM_KV_CUDA="0", CXX="g++", CPPFLAGS="-nostdinc", MAX_JOBS="1")
    assert_stopped(result, "liburing.h was not found", "liburing-dev", "libxxhash-dev")
    assert list(tmp_path.iterdir()) == []


def test_unknown_choice_of_cuda(tmp_path):
    result = build(tmp_path, SWARM_KV_CUDA="yes")
    assert_stopped(result, "SWARM_KV_CUDA must be 0, 1 or auto, not 'yes'")


def test_required_cuda_that_is_missing(tmp_path):
    result = build(tmp_path, SWARM_KV_CUDA="1", CUDA_HOME=str(tmp_path))
    reason = "without CUDA" if torch.version.cuda is None else "bin/nvcc does not exist"
    assert_stopped(result, "SWARM_KV_CUDA=1, but the CUDA library cannot be built", reason)


def test_optional_cuda_that_is_missing_is_reported(tmp_path):
    result = build(
        tmp_path, SWARM_KV_CUDA="auto", CUDA_HOME=str(tmp_path), CXX="g++", CPPFLAGS="-nostdinc"
    )
    assert_stopped(result, "building without the CUDA library", "liburing.h was not found")
