"""Prefix-aware: the replica with the longest cached prefix, unless the load is too uneven."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pydantic import Field

from jaxspec.sched.routing.candidates import Candidates
from jaxspec.sched.routing.power_of_two import less_loaded
from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import ROUTINGS, Routing, some
from jaxspec.sched.slots import Section


class PrefixAwareSettings(Section):
    """`routing: prefix_aware`: when the prefix counts, and when the load."""

    #: Share of the prompt that must be cached for the prefix to count.
    least_share: float = Field(default=0.3, ge=0, le=1)
    #: The load is uneven if the replica has more requests than this many more, and this many times more, than the least
    #: loaded one.
    most_more: int = Field(default=8, ge=0)
    most_times: float = Field(default=1.5, ge=1)


@ROUTINGS.register("prefix_aware", PrefixAwareSettings)
class PrefixAware(Routing):
    """As SGLang's cache-aware router does it: a request follows its prefix while the load is even, else it goes to the
    least loaded replica. It knows neither how much the prefix saves nor how much work a request is."""

    def __init__(self, settings: PrefixAwareSettings, random: Random) -> None:
        super().__init__(settings, random)
        self._limits, self._candidates = settings, Candidates(random)

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        replica = self._best(request, self._candidates.among(request, some(replicas), now))
        self._candidates.chose(request, replica)
        return replica

    def _best(self, request: RoutedRequest, candidates: Sequence[Replica]) -> Replica:
        limits, least = self._limits, less_loaded(self.random.sample(candidates, len(candidates)))
        cached, best = max(((r.cached_tokens(request), r) for r in candidates), key=lambda one: one[0])
        if cached < limits.least_share * request.prompt_len or not cached:
            return least
        more = best.requests - least.requests
        uneven = more > limits.most_more and best.requests > limits.most_times * least.requests
        return least if uneven else best
