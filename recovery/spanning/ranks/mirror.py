"""A rank's control page on its way from its host to the leader: in blocks, those that have changed."""

from __future__ import annotations

import time
from pathlib import Path

from understudy import replay
from understudy.protos import control_pb2 as pb

BLOCK = 1024
"""Bytes."""
NO_REPLIES = 4096
"""Bytes: the least that a log has for them, and that is memory from the beginning."""
MOST_STATE_BYTES = 16 << 20
"""Of a control page, and of what it has no place for: as many communicators as are kept account of."""
MOST_MANIFEST_BYTES = 4 << 20
"""In one message; the others follow with the next."""


class Feed:
    """On the rank's host: what the leader has not been told of one log."""

    def __init__(self, log: replay.Log) -> None:
        self._log = log
        self._told = b""
        self._manifests: dict[int, tuple[int, ...]] = {}
        self._epoch = 0
        self.sequence = 0

    def went_back(self) -> None:
        """Its commits are numbered anew from some point on: no manifest counts as told any more."""
        self._epoch += 1

    def news(self, rank: int) -> pb.RankNews:
        """What has changed since the last time; it is told with certainty, and in this order."""
        state = replay.control_state(self._log)
        news = self._made(rank, state)
        for index in range(0, len(state), BLOCK):
            block = state[index : index + BLOCK]
            if block != self._told[index : index + BLOCK]:
                news.blocks.append(pb.Block(index=index // BLOCK, data=block))
        self._told = state
        self._manifests = self._add_manifests(news, self._manifests)
        return news

    def whole(self, rank: int, *, anew: bool = False) -> pb.RankNews:
        """Everything, and manifests that were not told: beside the others, it may get lost on its way.

        `anew`: of manifests everything, too.
        """
        state = replay.control_state(self._log)
        news = self._made(rank, state)
        news.blocks.extend(
            pb.Block(index=index // BLOCK, data=state[index : index + BLOCK])
            for index in range(0, len(state), BLOCK)
        )
        self._add_manifests(news, {} if anew else self._manifests)
        return news

    def begin(self) -> None:
        """The leader knows nothing: it has just begun to follow."""
        self._told, self._manifests = b"", {}

    def _made(self, rank: int, state: bytes) -> pb.RankNews:
        self.sequence += 1
        return pb.RankNews(rank=rank, sequence=self.sequence, now_ns=time.monotonic_ns())

    def _add_manifests(
        self, news: pb.RankNews, known: dict[int, tuple[int, ...]]
    ) -> dict[int, tuple[int, ...]]:
        """Answers which the leader knows once it has this."""
        total = 0
        now: dict[int, tuple[int, ...]] = {}
        for commit in reversed(self._log.commits()):
            if not commit.has_manifest:
                continue
            try:
                offset, count = replay.manifest_place(self._log, commit.number)
                key = (self._epoch, offset, count, int(commit.complete), commit.record_index)
                if known.get(commit.number) == key:
                    now[commit.number] = key
                    continue
                if total + count > MOST_MANIFEST_BYTES and total:
                    continue
                data = replay.copy_shadow(self._log, offset, count)
            except replay.LogError:
                continue  # it has just been overwritten
            now[commit.number] = key
            total += count
            news.manifests.append(pb.ShadowPiece(offset=offset, data=data))
        return now


class Mirror:
    """On the leader's host: the same log, without records and contents."""

    def __init__(self, directory: Path, described: pb.RankDescription) -> None:
        """Raises LogError."""
        sizes = described.sizes
        replay.create_log(
            str(directory), rank=described.rank, world=described.world, segment_bytes=sizes.segment_bytes,
            segment_count=sizes.segment_count, dictionary_bytes=sizes.dictionary_bytes,
            reply_bytes=NO_REPLIES, shadow_bytes=sizes.shadow_bytes,
            snapshot_bytes=sizes.snapshot_bytes,
        )  # fmt: skip
        self.directory = directory
        self.log = replay.Log(str(directory))
        self._state = bytearray()
        self._newest: dict[int, int] = {}
        self._offset_ns: int | None = None
        replay.apply_control_orders(self.log, described.orders)
        self._sent = replay.control_orders(self.log)
        self.describe_anew(described)

    def describe_anew(self, described: pb.RankDescription) -> None:
        """Whoever described it may have been started anew, and count from the beginning; raises LogError."""
        self._state.clear()
        self._newest.clear()
        news = pb.RankNews(
            rank=described.rank, sequence=described.sequence, now_ns=described.now_ns,
            manifests=described.manifests,
            blocks=[
                pb.Block(index=index // BLOCK, data=described.state[index : index + BLOCK])
                for index in range(0, len(described.state), BLOCK)
            ],
        )  # fmt: skip
        self.apply(news)

    def apply(self, news: pb.RankNews) -> None:
        """Raises LogError if it makes no sense."""
        offset = time.monotonic_ns() - news.now_ns
        # What took longer on its way seems to have happened longer ago.
        self._offset_ns = offset if self._offset_ns is None else min(offset, self._offset_ns)
        for piece in news.manifests:
            replay.put_shadow(self.log, piece.offset, piece.data)
        for block in news.blocks:
            if news.sequence <= self._newest.get(block.index, -1):
                continue
            begin = block.index * BLOCK
            if not 0 < len(block.data) <= BLOCK or begin >= MOST_STATE_BYTES:
                raise replay.LogError("a block of a control page has another size")
            self._state.extend(bytes(max(0, begin - len(self._state))))
            self._state[begin : begin + len(block.data)] = block.data
            self._newest[block.index] = news.sequence
        replay.apply_control_state(self.log, bytes(self._state), self._offset_ns)

    def here_ns(self, there_ns: int) -> int:
        """A time of that host's CLOCK_MONOTONIC by ours."""
        return there_ns + (self._offset_ns or 0)

    def orders(self) -> bytes:
        """What is to be written into the log itself; empty: nothing new."""
        orders = replay.control_orders(self.log)
        return orders if orders != self._sent else b""

    def sent(self, orders: bytes) -> None:
        """They are there."""
        self._sent = orders or self._sent
