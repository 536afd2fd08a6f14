"""Route: over which links gradients go, host by host or not, and in buckets of what size, from measured links.

An all-reduce takes seconds that grow linearly with its bytes, whatever its way; so each way is as one link over which a
ring of all ranks would take the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cost.cluster import Cluster, Link
from headway.cost.model import all_reduce_seconds

MEBIBYTE = 1 << 20
LEAST_BUCKET, MOST_BUCKET = MEBIBYTE, 32 * MEBIBYTE

WORTH = 9.0
"""In a bucket of this many times latency x bandwidth x ranks, nine tenths of a ring's time move bytes."""


@dataclass(frozen=True)
class Route:
    """How a group of `ranks` is connected: by `link`, the slowest; with `neighbours` on each host, by `near` there.

    `to_each`: every rank sends to every other, as to owners of parameters.
    """

    ranks: int
    link: Link
    neighbours: int = 1
    near: Link | None = None
    to_each: bool = False

    @staticmethod
    def of(cluster: Cluster, ranks: Sequence[int]) -> Route:
        """Look at a group: neighbours count where it has equally many ranks on each of several hosts, in a row."""
        hosts = [cluster.host(rank) for rank in ranks]
        each = hosts.count(hosts[0])
        regular = len(ranks) % each == 0 and all(len({*hosts[i : i + each]}) == 1 for i in range(0, len(hosts), each))
        several = 1 < each < len(ranks) and regular and len(set(hosts)) == len(ranks) // each
        link = cluster.link(ranks)
        return Route(len(ranks), link, each, cluster.link(ranks[:each])) if several else Route(len(ranks), link)

    def all_reduce_seconds(self, num_bytes: float, *, coded: bool, by_host: bool) -> float:
        """Return the seconds of a sum: a ring of all ranks; with a codec each rank to each; or host by host."""
        hosts = self.ranks // self.neighbours
        if self.near is not None and by_host:
            near = all_reduce_seconds(num_bytes, self.neighbours, self.near)
            return all_reduce_seconds(num_bytes, hosts, self.link) + near
        if self.near is not None and (coded or self.to_each):
            return all_reduce_seconds(num_bytes * self.neighbours, hosts, self.link)
        return all_reduce_seconds(num_bytes, self.ranks, self.link)

    def by_host(self, *, coded: bool) -> bool:
        """Tell whether summing within hosts first is faster."""
        if self.near is None or self.to_each:
            return False
        ways = [self.all_reduce_seconds(64 * MEBIBYTE, coded=coded, by_host=way) for way in (True, False)]
        return ways[0] < ways[1]

    def as_link(self, *, coded: bool, by_host: bool) -> Link:
        """Return the link over which a ring of all ranks would take as long."""
        if self.ranks < 2:
            return self.link
        fixed = self.all_reduce_seconds(0, coded=coded, by_host=by_host)
        each = self.all_reduce_seconds(MEBIBYTE, coded=coded, by_host=by_host) - fixed
        steps = 2 * (self.ranks - 1)
        return Link(fixed / steps, steps / self.ranks * MEBIBYTE / each)


def bucket_bytes(link: Link, ranks: int) -> int:
    """Return the size of buckets that makes most of a ring's time move bytes, and starts it early: whole MiB, 1 to 32.

    A ring of n ranks sends n-ths of a bucket, each after a latency; so buckets grow with the ranks.
    """
    wanted = WORTH * link.latency * link.bandwidth * ranks
    return int(min(max(-(-wanted // MEBIBYTE) * MEBIBYTE, LEAST_BUCKET), MOST_BUCKET))
