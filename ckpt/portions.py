"""Who of the ranks of a host reads what, where several need the same blocks. Pure; all of them find the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transom_hpc.ckpt.layout import PIECE_BYTES, block_bytes

Ranges = Sequence[Sequence[int]]
"""First and last of blocks that follow each other, ascending."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Blocks of one stored part that the same ranks need.

    Args:
        number: of the portion; they are read in this order.
        part: number of the stored part.
        begin, end: bytes of it.
        ranks: that need it, ascending.
        reader: which of them reads it.
    """

    number: int
    part: int
    begin: int
    end: int
    ranks: tuple[int, ...]
    reader: int


def ranges(blocks: Sequence[int]) -> list[list[int]]:
    """Ascending numbers of blocks as ranges."""
    found: list[list[int]] = []
    for block in blocks:
        if found and found[-1][1] == block - 1:
            found[-1][1] = block
        else:
            found.append([block, block])
    return found


def portions(
    needs: Mapping[int, Mapping[int, Ranges]], sizes: Mapping[int, int], serving: frozenset[int] | set[int]
) -> list[Portion]:
    """Cut what ranks need into portions, and give each to one of those that need it.

    Args:
        needs: by rank, by number of the part, the blocks.
        sizes: bytes of each part, in the order in which they lie in the files.
        serving: ranks that can hand on what they read.

    Returns:
        All portions of all ranks, in the order of the parts; none of more than PIECE_BYTES unless it is one block.
    """
    found: list[Portion] = []
    read = dict.fromkeys(needs, 0)
    for part, nbytes in sizes.items():
        size = block_bytes(nbytes)
        most = max(1, PIECE_BYTES // size)
        edges: dict[int, list[int]] = {}
        for rank in sorted(needs):
            for first, last in needs[rank].get(part, ()):
                edges.setdefault(first, []).append(rank)
                edges.setdefault(last + 1, []).append(rank)
        inside: set[int] = set()
        at = 0
        for edge in sorted(edges):
            ranks = tuple(sorted(inside))
            readers = [rank for rank in ranks if rank in serving or len(ranks) == 1]
            for first in range(at, edge, most) if ranks else ():
                begin, end = first * size, min(min(first + most, edge) * size, nbytes)
                # Whoever has least to do; without anybody who serves, each of them for itself.
                for reader in [min(readers, key=lambda rank: (read[rank], rank))] if readers else ranks:
                    together = ranks if readers else (reader,)
                    found.append(Portion(len(found), part, begin, end, together, reader))
                    read[reader] += end - begin
            for rank in edges[edge]:
                inside ^= {rank}
            at = edge
    return found
