"""Candidates: the few of many replicas that a decision looks at."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from jaxspec.sched.routing.power_of_two import two
from jaxspec.sched.routing.recent_prefixes import RecentPrefixes
from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest

#: Least loaded replicas that a decision looks at, and seconds after which they are looked up again.
_SHORTEST, _REFRESH = 8, 0.1
#: Share of the replicas that are kept as the least loaded.
_SHARE = 8


class Candidates:
    """With up to `all_up_to` replicas, all of them; with more, two random ones, those that were sent the request's
    prefix lately, and the least loaded ones. So a decision takes about the same time for 20 replicas and for 1,000.

    An eighth of the replicas is kept as the least loaded, looked up in O(n log n) ten times a second and when most of
    them were chosen. A decision sees the first of them, and one that was chosen leaves: were they the same ones until
    the next look, they would get all requests until then.
    """

    def __init__(self, random: Random, all_up_to: int = 16) -> None:
        self._random, self._all_up_to = random, all_up_to
        self._prefixes = RecentPrefixes()
        self._shortest: list[Replica] = []
        self._members: frozenset[int] = frozenset()
        self._of: Sequence[Replica] = ()
        self._looked = float("-inf")

    def among(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
        """The candidates, without repetition."""
        if len(replicas) <= self._all_up_to:
            return replicas
        # A tuple cannot have changed since the last decision.
        if self._of is not replicas or not isinstance(replicas, tuple):
            self._of, self._members = replicas, frozenset(map(id, replicas))
            self._looked = float("-inf")
        if now - self._looked >= _REFRESH or len(self._shortest) < _SHORTEST:
            kept = max(2 * _SHORTEST, len(replicas) // _SHARE)
            # In random order before: of equally loaded ones the first would always be the candidates.
            shuffled = self._random.sample(replicas, len(replicas))
            self._shortest = sorted(shuffled, key=lambda replica: replica.requests)[:kept]
            self._looked = now
        found = {id(replica): replica for replica in (*two(replicas, self._random), *self._shortest[:_SHORTEST])}
        for replica in self._prefixes.find(request.page_keys):
            if id(replica) in self._members:
                found[id(replica)] = replica
        return [*found.values()]

    def chose(self, request: RoutedRequest, replica: Replica) -> None:
        """The request goes to this replica."""
        if replica in self._shortest:
            self._shortest.remove(replica)
        self._prefixes.add(request.page_keys, replica)
