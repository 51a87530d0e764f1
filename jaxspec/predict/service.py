"""The length predictor beside the engine: a thread that predicts, and its counters."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.predict.predictor import Learner, LengthPredictor


@dataclass(slots=True)
class PredictionCounts:
    """`made` predictions of lengths, `late` ones whose request had ended by then, requests that went `without` because
    too many waited or the predictor failed, and the seconds that the predictor took, learning included."""

    made: int = 0
    late: int = 0
    without: int = 0
    seconds: float = 0.0


log = logging.getLogger(__name__)

#: Texts of a batch. While one is computed the next ones gather; there is never more than one under way.
BATCH = 32
#: Requests that may wait for a prediction; later ones go without.
MOST_WAITING = 1024
#: The encoder reads the last 512 of its tokens, which so many of the model's hold in all but strange texts.
TOKENS_READ = 2048
#: Seconds between two writes of what was learned, and for which the thread sleeps at most.
FLUSH_EVERY = 30.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """One request. Its id may be given again after its end, so tickets are told apart by identity."""

    request_id: str
    prompt_ids: Sequence[int]
    text: str | None = None
    length: float | None = None


class PredictionService:
    """`add`, `apply` and `ended` are for the engine's thread; none of them waits. `decode` turns ids into text."""

    def __init__(
        self,
        predictor: LengthPredictor,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.perf_counter,
        most_waiting: int = MOST_WAITING,
        flush_every: float = FLUSH_EVERY,
    ) -> None:
        self.counts = PredictionCounts()
        self._predictor, self._decode, self._clock = predictor, decode, clock
        self._learner = predictor if isinstance(predictor, Learner) else None
        self._most_waiting, self._flush_every = most_waiting, flush_every
        self._changed = threading.Condition()
        self._live: dict[str, _Ticket] = {}
        self._waiting: deque[_Ticket] = deque()
        self._ready: deque[_Ticket] = deque()
        self._learned: deque[tuple[_Ticket, int]] = deque(maxlen=most_waiting)
        self._warm, self._closing = True, False
        self._failed = False  # and said so
        self._thread = threading.Thread(target=self._run, name="jaxspec-predictions", daemon=True)

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """What to compile before `warm_up`, as (name, job)."""
        return self._predictor.programs()

    def warm_up(self) -> None:
        """Load what the predictor keeps, and compile what is not compiled yet."""
        self._predictor.warm_up()

    def set_paused(self, held: bool) -> None:
        """Hold back answers, for as long as `warm_up` is to come or under way, or begin with those held back."""
        with self._changed:
            self._warm = not held
            self._changed.notify()

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Take in and write what is left to learn, then stop. May be called again, and without a start."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning("the length predictor did not stop within %g s; what it learned last is lost", timeout)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_ids: Sequence[int]) -> None:
        """Ask for a prediction."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._most_waiting:
                self.counts.without += 1
                return
            ticket = _Ticket(request_id, prompt_ids[-TOKENS_READ:])
            self._live[request_id] = ticket
            self._waiting.append(ticket)
            self._changed.notify()

    def apply(self, predicted: Callable[[str, float, float], bool], now: float) -> None:
        """Hand over what is there, as `Scheduler.predicted` takes it."""
        while self._ready:
            ticket = self._ready.popleft()
            current = self._live.get(ticket.request_id) is ticket
            assert ticket.length is not None
            if not (current and predicted(ticket.request_id, ticket.length, now)):
                self.counts.late += 1

    def ended(self, request_id: str, tokens: int, reason: str) -> None:
        """A request has written so many tokens and ended for this reason.

        One that was cut off at its limit would have written more: it teaches something only if less was predicted.
        """
        with self._changed:
            if (ticket := self._live.pop(request_id, None)) is None:
                return
            whole = reason == "stop" or (reason == "length" and ticket.length is not None and ticket.length < tokens)
            if self._learner is not None and whole and tokens > 0:
                self._learned.append((ticket, tokens))
                self._changed.notify()

    # -- its own thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        flushed = self._clock()
        while True:
            with self._changed:
                if not self._warm:
                    if self._closing:
                        return  # nothing was loaded, so nothing is to be kept
                    self._changed.wait(self._flush_every)
                    continue
                if not (self._waiting or self._learned or self._closing):
                    self._changed.wait(self._flush_every)
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                learned = [self._learned.popleft() for _ in range(min(BATCH, len(self._learned)))]
                closing = self._closing and not learned
            begun = self._clock()
            if batch := [t for t in batch if self._live.get(t.request_id) is t]:
                self._guarded(lambda batch=batch: self._predict(batch), len(batch))
            if learned:
                self._guarded(lambda learned=learned: self._learn(learned), 0)
            ended = self._clock()
            if batch or learned:
                self.counts.seconds += ended - begun
            if self._learner is not None and (closing or ended - flushed >= self._flush_every):
                self._guarded(self._learner.flush, 0)
                flushed = ended
            if closing:
                return

    def _guarded(self, work: Callable[[], None], requests: int) -> None:
        """Serving goes on whatever happens here; it is said once, with its trace."""
        try:
            work()
        except Exception:
            with self._changed:
                self.counts.without += requests
            if not self._failed:
                log.exception("the length predictor failed; requests go on without predictions where it does")
            self._failed = True

    def _predict(self, batch: list[_Ticket]) -> None:
        for ticket in batch:
            ticket.text = self._decode(ticket.prompt_ids)
        texts = list(dict.fromkeys(t.text for t in batch if t.text is not None))  # n answers to a prompt: once
        lengths = np.asarray(self._predictor.predict(texts), np.float64)
        if lengths.shape != (len(texts),) or not (np.isfinite(lengths) & (lengths > 0)).all():
            raise ValueError(f"{self._predictor.name} predicted {lengths} for {len(texts)} texts")
        by_text = dict(zip(texts, lengths.tolist(), strict=True))
        for ticket in batch:
            assert ticket.text is not None
            ticket.length = max(1.0, by_text[ticket.text])
            self._ready.append(ticket)
        self.counts.made += len(batch)

    def _learn(self, learned: list[tuple[_Ticket, int]]) -> None:
        assert self._learner is not None
        texts = [self._decode(t.prompt_ids) if t.text is None else t.text for t, _ in learned]
        self._learner.learn(texts, [tokens for _, tokens in learned])
