"""The manifest: what a committed checkpoint is made of. Pure text; who reads and writes the file is elsewhere.

It is written last. It protects itself with a checksum, so a manifest that can be read is whole and unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from transom_hpc.ckpt.layout import Entry, blocks

FORMAT = 1
FILE = "manifest.json"
_FOLDER = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True, slots=True)
class Stored:
    """One array in a checkpoint's files.

    Args:
        entry: what it is, with the checksum of each block.
        rank: whose own it is; None where all ranks hold the same.
        path: dataset in the HDF5 file.
        file: name of the file in the checkpoint's folder.
        offset: first byte in the file; its bytes lie together.
    """

    entry: Entry
    rank: int | None
    path: str
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Args:
        step: the training step after which it was taken.
        attempt: who wrote it; these sort in the order of time.
        world_size: ranks that took part.
        metrics: figures given with the step.
        files: name and size in bytes of each data file.
        stored: everything in it.
        saved_at: date and time in UTC, ISO 8601, for people.
        writer: which writer put the data there; both give the same bytes.
    """

    step: int
    attempt: str
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, int]
    stored: tuple[Stored, ...]
    saved_at: str
    writer: str = "direct"

    @property
    def nbytes(self) -> int:
        """Bytes of state in it."""
        return sum(item.entry.nbytes for item in self.stored)


class BadManifest(ValueError):
    """The text is no whole manifest."""


def folder(step: int) -> str:
    """The name of a committed step's folder."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a committed folder's name; None where it is no such name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found and folder(int(found[1])) == name else None


def encode(manifest: Manifest) -> bytes:
    """The manifest as text, with its checksum."""
    body = {
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "files": dict(manifest.files),
        "saved_at": manifest.saved_at,
        "writer": manifest.writer,
        "tensors": [
            {
                **entry_to_json(item.entry),
                "rank": item.rank,
                "path": item.path,
                "file": item.file,
                "offset": item.offset,
            }
            for item in manifest.stored
        ],
    }
    text = _canonical(body)
    return b'{"transom_checkpoint":%d,"xxh3":"%s","body":%s}\n' % (FORMAT, _sum(text).encode(), text)


def decode(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        BadManifest: cut short, changed, of a format that is not known.
    """
    try:
        document = json.loads(data)
        body = document["body"]
        if document["transom_checkpoint"] != FORMAT:
            raise BadManifest(f"format {document['transom_checkpoint']!r}, this version reads {FORMAT}")
        if _sum(_canonical(body)) != document["xxh3"]:
            raise BadManifest("its checksum does not match")
        return Manifest(
            step=body["step"],
            attempt=body["attempt"],
            world_size=body["world_size"],
            metrics=body["metrics"],
            files=body["files"],
            saved_at=body["saved_at"],
            writer=body.get("writer", "direct"),  # 0.1 had no other
            stored=tuple(
                Stored(entry_from_json(item), item["rank"], item["path"], item["file"], item["offset"])
                for item in body["tensors"]
            ),
        )
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadManifest(f"not a whole manifest ({type(error).__name__}: {error})") from error


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """An entry as ranks tell it to each other and the manifest holds it."""
    value: dict[str, Any] = {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "bytes": entry.nbytes,
        "xxh3": list(entry.sums),
    }
    if entry.shape != entry.global_shape:
        value["global_shape"] = list(entry.global_shape)
        value["start"] = list(entry.start)
    return value


def entry_from_json(value: Mapping[str, Any]) -> Entry:
    """The entry that the JSON stands for.

    Raises:
        BadManifest, KeyError, TypeError: it stands for none.
    """
    shape = tuple(value["shape"])
    entry = Entry(
        name=value["name"],
        dtype=value["dtype"],
        shape=shape,
        global_shape=tuple(value.get("global_shape", shape)),
        start=tuple(value.get("start", (0,) * len(shape))),
        nbytes=value["bytes"],
        sums=tuple(value["xxh3"]),
    )
    if len(entry.sums) != len(blocks(entry.nbytes)):
        raise BadManifest(f"{entry.name}: {len(entry.sums)} checksums for {entry.nbytes} bytes")
    return entry


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _sum(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)
