"""Where the ranks of a job are, and which of them have the same state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`gpus` ranks, one GPU each: `replicas` copies of a state in `gpus / replicas` shards.

    Rank r has shard r modulo the number of shards, as frameworks number them whose data parallelism is the
    outermost axis; so replicas are as far apart as they can be, and mostly on different hosts.  Hosts and
    racks are filled in the order of ranks.
    """

    gpus: int
    replicas: int
    gpus_per_host: int = 8
    hosts_per_rack: int = 4

    def __post_init__(self) -> None:
        if min(self.gpus, self.replicas, self.gpus_per_host, self.hosts_per_rack) < 1:
            raise ValueError("a layout has at least one GPU, replica, GPU per host and host per rack")
        if self.gpus % self.replicas:
            raise ValueError(f"{self.gpus} GPUs are not {self.replicas} replicas of equal size")

    @property
    def shards(self) -> int:
        """Parts that a replica has."""
        return self.gpus // self.replicas

    @property
    def hosts(self) -> int:
        """The last one may have fewer GPUs."""
        return -(-self.gpus // self.gpus_per_host)

    @property
    def racks(self) -> int:
        """The last one may have fewer hosts."""
        return -(-self.hosts // self.hosts_per_rack)

    def shard_of(self, rank: int) -> int:
        """Ranks with the same one are replicas."""
        return rank % self.shards

    def host_of(self, rank: int) -> int:
        """Counted from 0."""
        return rank // self.gpus_per_host

    def on_host(self, host: int) -> range:
        """Its ranks."""
        return range(host * self.gpus_per_host, min(self.gpus, (host + 1) * self.gpus_per_host))

    def in_rack(self, rack: int) -> range:
        """Its hosts."""
        return range(rack * self.hosts_per_rack, min(self.hosts, (rack + 1) * self.hosts_per_rack))

    def lost_shards(self, failed: Iterable[int]) -> int:
        """How many shards no rank has any more when those have failed."""
        left: dict[int, int] = {}
        for rank in frozenset(failed):
            shard = self.shard_of(rank)
            left[shard] = left.get(shard, self.replicas) - 1
        return sum(count == 0 for count in left.values())

    def hosts_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """Where they are."""
        return frozenset(self.host_of(rank) for rank in ranks)
