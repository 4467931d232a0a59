"""Checksums of CRIU's images: what is restored is what was dumped, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec

from understudy.recovery.base.hostile_json import read

MANIFEST = "understudy.json"
_MANIFEST = msgspec.json.Decoder(dict[str, dict[str, tuple[int, str]]])
LARGEST_MANIFEST = 1 << 24


class Damaged(Exception):
    """Its text is a sentence."""


def seal(folder: Path) -> dict[str, int]:
    """Write down what each image is; answers their bytes.  Raises OSError."""
    sizes, entries = {}, {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".img":
            sizes[path.name] = path.stat().st_size
            entries[path.name] = [sizes[path.name], _digest(path)]
    (folder / MANIFEST).write_text(json.dumps({"images": entries}), encoding="utf-8")
    return sizes


def verify(folder: Path) -> None:
    """Raises Damaged with the first difference, and OSError."""
    manifest = folder / MANIFEST
    if manifest.stat().st_size > LARGEST_MANIFEST:
        raise Damaged(f"{MANIFEST} is too large")
    try:
        wanted = read(manifest.read_bytes(), _MANIFEST)["images"]
    except (ValueError, KeyError) as problem:
        raise Damaged(f"{MANIFEST} makes no sense") from problem
    found = {path.name for path in folder.iterdir() if path.suffix == ".img"}
    if odd := found ^ wanted.keys():
        raise Damaged(f"{sorted(odd)[0]} is {'not in the manifest' if odd & found else 'missing'}")
    if not wanted:
        raise Damaged("there are no images")
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file() or path.is_symlink() or path.stat().st_size != size:
            raise Damaged(f"{name} has not the size that it was written with")
        if _digest(path) != digest:
            raise Damaged(f"{name} has not the content that it was written with")


def _digest(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
