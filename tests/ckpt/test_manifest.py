"""A manifest that can be read is whole and unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash

from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.manifest import (
    BadManifest,
    Balance,
    Manifest,
    OtherManifest,
    Stored,
    decode,
    encode,
    entry_from_json,
    entry_to_json,
    folder,
    step_of,
)

ENTRY = Entry("tensors/w", "bfloat16", (2, 3), (4, 3), (2, 0), 12, ("00ff" * 8,))
WHOLE = Manifest(
    step=1200,
    attempt="A0002-L03",
    world_size=4,
    metrics={"loss": 1.5},
    files={"data-00000.h5": 4096},
    stored=(
        Stored(ENTRY, 1, "/shards/1/w", "data-00000.h5", 65536),
        Stored(replace(ENTRY, start=(0, 0)), None, "/shards/0/w", "data-00000.h5", 69632, (0, 2, 3)),
    ),
    saved_at="2026-01-01T00:00:00+00:00",
    written=(12, 4, 4, 4),
)


def test_comes_back() -> None:
    assert decode(encode(WHOLE)) == WHOLE
    assert WHOLE.nbytes == 24
    assert WHOLE.balance == Balance(4, 12, 6.0)
    assert replace(WHOLE, written=()).balance == Balance(0, 0, 0.0)


@pytest.mark.parametrize("ranks", [(0, 1), (2, 5, 8, 11, 14), (0, 1, 2, 3), (1, 2, 4, 8), (7,)])
def test_ranks_that_share_a_part(ranks: tuple[int, ...]) -> None:
    item = replace(WHOLE.stored[1], holders=ranks) if len(ranks) > 1 else replace(WHOLE.stored[0], rank=ranks[0])
    data = encode(replace(WHOLE, stored=(item,)))
    assert decode(data).stored == (item,)
    assert [rank for rank in range(20) if item.is_held_by(rank)] == list(ranks)
    assert item.lowest == ranks[0]


def test_evenly_spaced_ranks_take_no_room() -> None:
    item = replace(WHOLE.stored[1], holders=tuple(range(3, 9000, 8)))
    assert len(encode(replace(WHOLE, stored=(item,)))) < 700


def test_every_bit_and_every_cut_is_noticed() -> None:
    data = encode(WHOLE)
    for at in range(len(data) - 1):
        for bit in (1, 2, 16, 32):
            changed = bytearray(data)
            changed[at] ^= bit
            try:
                found = decode(bytes(changed))
            except BadManifest:
                continue
            assert found == WHOLE, "a change that means the same, such as the case of a hexadecimal escape"
        with pytest.raises(BadManifest):
            decode(data[:at])


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"transom_checkpoint":9,"xxh3":"","body":{}}'])
def test_other_text_is_refused(data: bytes) -> None:
    with pytest.raises(BadManifest):
        decode(data)


def test_folders() -> None:
    assert folder(1200) == "step-000001200"
    assert step_of("step-000001200") == 1200
    assert step_of(folder(12_345_678_901)) == 12_345_678_901
    for name in ("step-1200", ".step-000001200", "step-000001200.A1", "step-0000001200", "step-00000120x"):
        assert step_of(name) is None


def test_an_older_format_is_refused_by_name() -> None:
    with pytest.raises(OtherManifest, match="format 1, this version reads 2"):
        decode(b'{"transom_checkpoint":1,"xxh3":"%s","body":{}}\n' % xxhash.xxh3_128_hexdigest(b"{}").encode())


def test_an_entry_has_as_many_checksums_as_its_size_asks_for() -> None:
    value = entry_to_json(ENTRY)
    assert entry_from_json(value) == ENTRY
    for sums in ("", "00ff" * 16, ["00ff" * 8], None):
        with pytest.raises((BadManifest, TypeError)):
            entry_from_json({**value, "xxh3": sums})
