"""A replica as the router sees it: its last report, and what the router itself has sent there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxspec.sched.routing.report import ReplicaReport
from jaxspec.sched.routing.request import RoutedRequest

#: Output tokens of a request without a prediction, unless its max_tokens are fewer.
USUAL_TOKENS = 200.0
#: Weight of the newest request in a replica's mean TTFT and lateness.
_NEWEST = 0.1
#: Seconds that are added to TTFTs before they are compared: ratios of very short ones are chance.
_TTFT_FLOOR = 0.1


@dataclass(slots=True)
class _Sent:
    """A request that the router has sent and that has not ended."""

    request: RoutedRequest
    time: float
    prompt_tokens: int
    output_tokens: float
    #: Expected TTFT; None: not known.
    ttft: float | None
    #: Whether the report was made after it was sent, so that it counts there.
    reported: bool = False
    answered: bool = False

    def lateness(self, now: float) -> float | None:
        """Seconds since it was sent, relative to its expected TTFT; None: that is not known."""
        if self.ttft is None:
            return None
        return (now - self.time + _TTFT_FLOOR) / (self.ttft + _TTFT_FLOOR)


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of the engine, by `name`.

    Between reports the router adds what it has sent there since, so that its next decisions know of it: else all
    requests between two reports would go to the same replica. It also takes off what the replica should have done since
    its report. With several routers, the report counts the requests of all, and what the others have sent since is not
    known.
    """

    name: str
    #: None: it has not reported yet.
    report: ReplicaReport | None = None
    #: Running means of the seconds to the first token of requests sent here, and of those relative to what was
    #: expected, and the number of requests that they are over.
    ttft: float = 0.0
    lateness: float = 1.0
    answered: int = 0
    _sent: dict[str, _Sent] = field(default_factory=dict[str, _Sent])
    #: Requests that the last report counts and that have ended since.
    _ended: int = 0
    #: Prefix keys of requests sent here that have not ended: they are in its cache or will be.
    _keys: Counter[int] = field(default_factory=Counter[int])
    #: Requests sent since the report, and their tokens.
    _new: int = 0
    _new_prompt: int = 0
    _new_output: float = 0.0

    # -- events ----------------------------------------------------------------------------------------------------

    def sent(self, request: RoutedRequest, now: float, ttft: float | None = None) -> None:
        """A request was sent here, and its first token is expected after `ttft` seconds (None: not known). Raises
        `ValueError` if one with its id is here already."""
        if request.id in self._sent:
            raise ValueError(f"request {request.id!r} was sent to {self.name} already")
        prompt = request.prompt_len - self.cached_tokens(request)
        self._sent[request.id] = sent = _Sent(request, now, prompt, expected(request), ttft)
        self._keys.update(request.page_keys)
        self._count(sent, 1)

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request came back. Unknown ids are ignored."""
        sent = self._sent.get(request_id)
        if sent is None or sent.answered:
            return
        sent.answered = True
        self.answered += 1
        weight = max(_NEWEST, 1 / self.answered)
        self.ttft += weight * (now - sent.time - self.ttft)
        if (late := sent.lateness(now)) is not None:
            self.lateness += weight * (late - self.lateness)

    def ended(self, request_id: str, now: float) -> None:
        """A request has ended here, by itself or not. Unknown ids are ignored."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        if sent.reported:
            self._ended += 1
        else:
            self._count(sent, -1)
        self._keys.subtract(sent.request.page_keys)
        for key in sent.request.page_keys:
            if self._keys[key] <= 0:
                del self._keys[key]

    def update(self, report: ReplicaReport) -> None:
        """Take a report; an older one than the last is ignored."""
        if self.report is not None and report.time < self.report.time:
            return
        self.report, self._ended = report, 0
        for sent in reversed(self._sent.values()):  # the last sent first
            if sent.reported:
                break
            if sent.time <= report.time:
                sent.reported = True
                self._count(sent, -1)

    def _count(self, sent: _Sent, sign: int) -> None:
        self._new += sign
        self._new_prompt += sign * sent.prompt_tokens
        self._new_output = self._new_output + sign * sent.output_tokens if self._new else 0.0

    def forget_ttft(self) -> None:
        """Start its mean TTFT again from zero: it may have become faster."""
        self.ttft, self.lateness, self.answered = 0.0, 1.0, 0

    # -- what the policies ask ---------------------------------------------------------------------------------------

    def age(self, now: float) -> float:
        """Seconds since its report was made; infinite without one."""
        return float("inf") if self.report is None else now - self.report.time

    @property
    def outstanding(self) -> int:
        """Requests sent here by this router that have not ended."""
        return len(self._sent)

    def lateness_by(self, now: float) -> tuple[float, int]:
        """(mean lateness, number of requests that it is over), where a request whose first token is later than that by
        now counts as if it came now: a replica that hangs answers none."""
        mean, count = self.lateness, self.answered
        for sent in self._sent.values():
            if not sent.answered and (late := sent.lateness(now)) is not None and late > self.lateness:
                count += 1
                mean += max(_NEWEST, 1 / count) * (late - mean)
        return mean, count

    @property
    def requests(self) -> int:
        """Requests that it has: those of its report that have not ended, and those sent since."""
        if self.report is None:
            return len(self._sent)
        return max(0, self.report.requests - self._ended) + self._new

    def work(self, now: float) -> tuple[float, float]:
        """(prompt tokens to compute, output tokens to generate) of its requests, as predicted; without a report, of
        those sent here.

        A report ages: what it counts is reduced by what the replica should have done since, prompts first.
        """
        report = self.report
        if report is None:
            return float(self._new_prompt), self._new_output
        left = max(0.0, now - report.time)
        prompt = max(0.0, report.prompt_tokens - left / report.seconds_per_prompt_token)
        left -= (report.prompt_tokens - prompt) * report.seconds_per_prompt_token
        running = min(report.requests, report.slots)
        output = max(0.0, report.output_tokens - running * left / report.token_seconds(running))
        return prompt + self._new_prompt, output + self._new_output

    def cached_pages(self, request: RoutedRequest) -> int:
        """Leading pages of the prompt that are in its cache, or will be once requests sent before are computed."""
        cached, sent = self.report.prefixes if self.report is not None else frozenset[int](), self._keys
        for i, key in enumerate(request.page_keys):
            if key not in cached and key not in sent:
                return i
        return len(request.page_keys)

    def cached_tokens(self, request: RoutedRequest) -> int:
        """Prompt tokens that the replica probably has in its prefix cache; the last prompt token is always computed."""
        if self.report is None:
            return 0
        return min(request.prompt_len - 1, self.cached_pages(request) * self.report.page_size)


def expected(request: RoutedRequest) -> float:
    """Output tokens that a request is expected to have; a usual number without a prediction."""
    tokens = USUAL_TOKENS if request.expected_tokens is None else request.expected_tokens
    return min(tokens, float(request.max_tokens))
