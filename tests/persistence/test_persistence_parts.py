"""Which rank writes what of a snapshot that several ranks share."""

from __future__ import annotations

import random

from understudy.recovery.snapshots.stores.parts import SMALL_BYTES, Holder, Holding, split


def test_what_all_ranks_hold_is_written_once_and_spread_evenly() -> None:
    shared = [(10_000 + number, number) for number in range(40)]
    ranks = {
        rank: [Holding(100 * rank + number, size, digest) for number, (size, digest) in enumerate(shared)]
        for rank in range(4)
    }
    parts = split(ranks)
    written = [buffer.digest for part in parts.values() for buffer in part.own]
    assert sorted(written) == [digest for _, digest in shared]
    loads = [sum(buffer.bytes for buffer in part.own) for part in parts.values()]
    assert max(loads) - min(loads) <= 10_039
    for rank, part in parts.items():
        assert {b.handle for b in part.own} | set(part.other_holders) == {b.handle for b in ranks[rank]}


def test_what_only_one_rank_holds_it_writes_and_small_buffers_everybody_writes() -> None:
    ranks = {
        0: [Holding(1, 1 << 20, 7), Holding(2, SMALL_BYTES - 1, 8)],
        1: [Holding(5, 1 << 20, 9), Holding(6, SMALL_BYTES - 1, 8)],
    }
    parts = split(ranks)
    assert {rank: len(part.own) for rank, part in parts.items()} == {0: 2, 1: 2}
    assert not parts[0].other_holders and not parts[1].other_holders


def test_the_same_digest_with_another_length_is_another_content() -> None:
    parts = split({0: [Holding(1, 8192, 7)], 1: [Holding(1, 16384, 7)]})
    assert not parts[0].other_holders and not parts[1].other_holders


def test_a_content_that_a_rank_has_twice_is_written_once() -> None:
    parts = split({0: [Holding(1, 8192, 7), Holding(2, 8192, 7)]})
    assert parts[0].own == (Holding(1, 8192, 7),)
    assert parts[0].other_holders == {2: Holder(0, 1)}


def test_whoever_is_named_as_the_writer_writes_these_very_bytes(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        ranks = {
            rank: [
                Holding(handle, chance.choice((100, 8192, 1 << 20)), chance.randrange(6))
                for handle in range(chance.randrange(12))
            ]
            for rank in range(chance.randrange(1, 6))
        }
        parts = split(ranks)
        assert parts == split(ranks)
        content = {(rank, b.handle): (b.bytes, b.digest) for rank in ranks for b in ranks[rank]}
        for rank, part in parts.items():
            assert len(part.own) + len(part.other_holders) == len(ranks[rank])
            for handle, holder in part.other_holders.items():
                writes = {b.handle: (b.bytes, b.digest) for b in parts[holder.rank].own}
                assert writes[holder.handle] == content[(rank, handle)]
