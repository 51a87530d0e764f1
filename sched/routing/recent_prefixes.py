"""An inverted index: which replicas were sent a prefix lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxspec.sched.routing.replica import Replica

#: Prefixes that are remembered, about 30 MB of them, and replicas of each.
_CAPACITY, _EACH = 1 << 17, 4


class RecentPrefixes:
    """Maps prefix keys to the replicas that were sent them, the last ones first.

    Finds candidates among many replicas without looking at all of them. Whether they still have the prefix, their
    reports say. The least recently sent prefixes are forgotten.
    """

    def __init__(self, capacity: int = _CAPACITY, each: int = _EACH) -> None:
        self._capacity, self._each = capacity, each
        self._replicas: OrderedDict[int, tuple[Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, keys: Sequence[int], replica: Replica) -> None:
        """A request with these prefix keys was sent to a replica. O(keys)."""
        known = self._replicas
        for key in reversed(keys):  # the end of a prefix is forgotten before its beginning
            others = known.pop(key, ())
            known[key] = (replica, *(other for other in others if other is not replica))[: self._each]
        while len(known) > self._capacity:
            known.popitem(last=False)

    def find(self, keys: Sequence[int]) -> list[Replica]:
        """Replicas that were sent the longest known prefix of these keys, then those that were sent half of it.

        Most recent first. O(log keys): a prefix is known only as long as its beginning is.
        """
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._replicas:
                low = middle
            else:
                high = middle - 1
        found: dict[str, Replica] = {}
        for depth in dict.fromkeys((low, low // 2)):
            if depth:
                for replica in self._replicas[keys[depth - 1]]:
                    found.setdefault(replica.name, replica)
        return [*found.values()]
