"""`swarm_kv.pytest_plugin` as somebody's own tests use it."""

from __future__ import annotations

import os
import pathlib

import pytest

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).resolve().parent.parent

THEIRS = """
import pytest
import torch
from swarm_kv import SwarmConfig
from tests.conftest import make_tiny_model
from tests.letters import Letters

OPTIONS = {"context": 1024, "steps": 4, "questions": 1}


@pytest.fixture(scope="module")
def accuracy(swarm_accuracy, tmp_path_factory):
    def accuracy(**settings):
        config = SwarmConfig([tmp_path_factory.mktemp("drive")], dram_bytes="48MiB", **settings)
        model = make_tiny_model("qwen3", torch.float32)
        return swarm_accuracy(model, Letters(), config, **OPTIONS)

    return accuracy


def test_everything_is_read(accuracy):
    found = accuracy(sparsity=1.0)
    found.check(mean_kl=1e-4, perplexity=1e-3, points=0)
    assert set(found.points_lost) == {"passkey", "multikey", "tracking"}


def test_hardly_anything_is_read(accuracy):
    accuracy(sparsity=1e-4, window=16).check()
"""


def test_it_passes_and_fails_where_it_should(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makeconftest('pytest_plugins = ["swarm_kv.pytest_plugin"]')
    pytester.makepyfile(THEIRS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: sparse decoding is too far from full attention:",
            "*mean KL: * nats, at most 0.012 are allowed",
            "*read more of the context (`sparsity`, `window`)*",
            "*method*perplexity*ratio*mean KL*",
            "*full attention*",
            "*default*",
        ]
    )


def test_other_pytest_runs_do_not_load_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            assert "swarm_kv" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
