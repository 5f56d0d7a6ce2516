"""A manifest that can be read is whole and unchanged."""

from __future__ import annotations

import pytest

from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.manifest import BadManifest, Manifest, Stored, decode, encode, folder, step_of

ENTRY = Entry("tensors/w", "bfloat16", (2, 3), (4, 3), (2, 0), 12, ("00ff" * 8,))
WHOLE = Manifest(
    step=1200,
    attempt="A0002-L03",
    world_size=4,
    metrics={"loss": 1.5},
    files={"data-00000.h5": 4096},
    stored=(Stored(ENTRY, 1, "/shards/1/w", "data-00000.h5", 65536),),
    saved_at="2026-01-01T00:00:00+00:00",
)


def test_comes_back() -> None:
    assert decode(encode(WHOLE)) == WHOLE
    assert WHOLE.nbytes == 12


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


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"transom_checkpoint":2,"xxh3":"","body":{}}'])
def test_other_text_is_refused(data: bytes) -> None:
    with pytest.raises(BadManifest):
        decode(data)


def test_folders() -> None:
    assert folder(1200) == "step-000001200"
    assert step_of("step-000001200") == 1200
    assert step_of(folder(12_345_678_901)) == 12_345_678_901
    for name in ("step-1200", ".step-000001200", "step-000001200.A1", "step-0000001200", "step-00000120x"):
        assert step_of(name) is None
