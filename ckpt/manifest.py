"""The manifest: what a committed checkpoint is made of. Pure text; who reads and writes the file is elsewhere.

It is written last. It protects itself with a checksum, so a manifest that can be read is whole and unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from transom_hpc.ckpt.layout import Entry, block_count

FORMAT = 2
"""1 had a checksum for each 16 MiB whatever the array's size, and did not say which ranks share a part."""

FILE = "manifest.json"
_FOLDER = re.compile(r"step-(\d{9,})")
_HEAD = re.compile(rb'\{"transom_checkpoint":(\d{1,9}),"xxh3":"([0-9a-f]*)","body":')
_DIGITS = 32
"""Of a checksum: those of one array stand behind each other as one text, since there may be very many."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One array in a checkpoint's files.

    Args:
        entry: what it is, with the checksum of each block.
        rank: whose it is; None where no rank that has this place of the array holds anything else (see layout.Shard).
        path: dataset in the HDF5 file.
        file: name of the file in the checkpoint's folder.
        offset: first byte in the file; its bytes lie together.
        holders: the ranks that hold it where they are several, but not all; empty otherwise.
    """

    entry: Entry
    rank: int | None
    path: str
    file: str
    offset: int
    holders: tuple[int, ...] = ()

    @property
    def lowest(self) -> int:
        """The lowest rank that holds it."""
        return self.holders[0] if self.holders else self.rank or 0

    def is_held_by(self, rank: int) -> bool:
        """Whether a rank held it when it was saved."""
        return rank in self.holders if self.holders else self.rank in (None, rank)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the writing of a checkpoint was spread, in bytes.

    Args:
        least: that a rank wrote.
        most: that a rank wrote.
        mean: of all ranks.
    """

    least: int
    most: int
    mean: float


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
        written: bytes that each rank wrote, in rank order.
    """

    step: int
    attempt: str
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, int]
    stored: tuple[Stored, ...]
    saved_at: str
    writer: str = "direct"
    written: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of state in it."""
        return sum(item.entry.nbytes for item in self.stored)

    @property
    def balance(self) -> Balance:
        """How evenly its writing was spread."""
        return balance(self.written)


def balance(written: Sequence[int]) -> Balance:
    """From the bytes that each rank wrote to how even that is; all zero where nobody is named."""
    return Balance(min(written, default=0), max(written, default=0), sum(written) / max(1, len(written)))


class BadManifest(ValueError):
    """The text is no whole manifest."""


class OtherManifest(ValueError):
    """The text is a manifest of another format."""


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
        "written": list(manifest.written),
        "tensors": [
            {
                **entry_to_json(item.entry),
                "rank": item.rank,
                "path": item.path,
                "file": item.file,
                "offset": item.offset,
                **({"holders": _ranks_to_json(item.holders)} if item.holders else {}),
            }
            for item in manifest.stored
        ],
    }
    text = _canonical(body)
    return b'{"transom_checkpoint":%d,"xxh3":"%s","body":%s}\n' % (FORMAT, _sum(FORMAT, text).encode(), text)


def decode(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        BadManifest: cut short, or changed.
        OtherManifest: of a format that this version does not read.
    """
    found = _HEAD.match(data)
    if found is None:
        raise BadManifest("not a whole manifest")
    number, text = int(found[1]), data[found.end() : -2]
    if not data.endswith(b"}\n") or _sum(number, text).encode() != found[2]:
        raise BadManifest("its checksum does not match")
    if number != FORMAT:
        raise OtherManifest(f"format {number}, this version reads {FORMAT}")
    try:
        body = json.loads(text)
        return Manifest(
            step=body["step"],
            attempt=body["attempt"],
            world_size=body["world_size"],
            metrics=body["metrics"],
            files=body["files"],
            saved_at=body["saved_at"],
            writer=body["writer"],
            written=tuple(body["written"]),
            stored=tuple(
                Stored(
                    entry_from_json(item),
                    item["rank"],
                    item["path"],
                    item["file"],
                    item["offset"],
                    _ranks_from_json(item.get("holders", [])),
                )
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
        "xxh3": "".join(entry.sums),
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
    sums: str = value["xxh3"]
    if not isinstance(sums, str) or len(sums) != _DIGITS * block_count(value["bytes"]):
        raise BadManifest(f"{value['name']}: not as many checksums as {value['bytes']} bytes have")
    return Entry(
        name=value["name"],
        dtype=value["dtype"],
        shape=shape,
        global_shape=tuple(value.get("global_shape", shape)),
        start=tuple(value.get("start", (0,) * len(shape))),
        nbytes=value["bytes"],
        sums=tuple(sums[at : at + _DIGITS] for at in range(0, len(sums), _DIGITS)),
    )


def _ranks_to_json(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks that hold the same; those of a mesh are mostly evenly spaced."""
    step = ranks[1] - ranks[0]
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return {"first": ranks[0], "last": ranks[-1], "step": step}
    return list(ranks)


def _ranks_from_json(value: Any) -> tuple[int, ...]:
    if isinstance(value, Mapping):
        return tuple(range(value["first"], value["last"] + 1, value["step"]))
    return tuple(value)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _sum(number: int, text: bytes) -> str:
    """Of the format's number too, so that a damaged number is not taken for another format; the first had none."""
    summed = xxhash.xxh3_128(b"" if number == 1 else b"%d" % number)
    summed.update(text)
    return summed.hexdigest()
