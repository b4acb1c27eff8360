"""Files of named tensors with a kind, a version and JSON fields: safetensors, no pickle.

Files are private (mode 0600), because keys and token digests tell what a text said, and appear by
one rename, so that a file is complete whenever it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import ArgumentError

_KIND, _VERSION, _FIELDS = "kind", "version", "fields"


def save(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    tensors: dict[str, torch.Tensor],
    fields: dict[str, Any],
) -> None:
    """Write `tensors` and `fields` (plain values) to `path`, replacing what is there.

    Raises:
        OSError: the folder does not exist, is not writable or is full; no partial file is left.
    """
    target = pathlib.Path(path).expanduser()
    metadata = {_KIND: kind, _VERSION: str(version), _FIELDS: json.dumps(fields)}
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    os.close(handle)
    try:
        save_file(packed, partial, metadata)
        os.chmod(partial, 0o600)
        os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        if isinstance(error, SafetensorError):  # what a full disk raises
            raise OSError(f"cannot write `{target}`: {error}") from error
        raise


def load(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and fields of the file that `save` wrote with this kind and version.

    Raises:
        ArgumentError: not such a file, or of another kind or version.
        OSError: the file cannot be read.
    """
    source = pathlib.Path(path).expanduser()
    with open(source, "rb"):  # the usual OSError, which names the path
        pass
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(source, metadata, kind, version)
            fields = json.loads(metadata.get(_FIELDS, ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ArgumentError(f"`{source}` is no {kind} file: {error}") from None
    if not isinstance(fields, dict):
        raise ArgumentError(f"`{source}` is no {kind} file: its fields are no JSON object")
    return tensors, fields


def take(path: object, fields: dict[str, Any], types: dict[str, type]) -> dict[str, Any]:
    """The values of `fields`, which must have exactly the names and types of `types`.

    Whole numbers pass as floats.

    Raises:
        ArgumentError: a name is missing or unknown, or a value has another type.
    """
    if set(fields) != set(types):
        missing, unknown = sorted(set(types) - set(fields)), sorted(set(fields) - set(types))
        raise ArgumentError(f"`{path}` lacks the fields {missing} and has unknown ones {unknown}")
    for name, kind in types.items():
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(fields[name], allowed) or isinstance(fields[name], bool):
            raise ArgumentError(
                f"field `{name}` of `{path}` is {fields[name]!r}, expected {kind.__name__}"
            )
    return dict(fields)


def _check(source: pathlib.Path, metadata: dict[str, str], kind: str, version: int) -> None:
    found = metadata.get(_KIND)
    if found != kind:
        raise ArgumentError(f"`{source}` is no {kind} file: its kind is {found!r}")
    if metadata.get(_VERSION) != str(version):
        raise ArgumentError(
            f"`{source}` has version {metadata.get(_VERSION)} of the {kind} format, this swarm_kv "
            f"reads version {version}: make the file again"
        )
