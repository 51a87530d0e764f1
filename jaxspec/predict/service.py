"""Runs the length predictor in its own thread next to the engine."""

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
    """Counters of the prediction service.

    made     predictions
    late     predictions that came after their request had ended
    without  requests without a prediction, because too many waited or the predictor failed
    seconds  time spent predicting and learning
    """

    made: int = 0
    late: int = 0
    without: int = 0
    seconds: float = 0.0


log = logging.getLogger(__name__)

#: Most texts per batch. One batch is computed at a time, while the next one gathers.
BATCH = 32
#: Most requests that wait for a prediction; further ones get none.
MOST_WAITING = 1024
#: Last prompt tokens that are decoded for the encoder, which reads 512 of its own: nearly always enough for those.
TOKENS_READ = 2048
#: Seconds between two flushes of learned lengths, and the longest sleep of the thread.
FLUSH_EVERY = 30.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """One request's prediction. Compared by identity: a request id may be reused after the request has ended."""

    request_id: str
    prompt_ids: Sequence[int]
    text: str | None = None
    length: float | None = None


class NoPredictions:
    """Stands in for a `PredictionService` where no predictor reads prompts."""

    #: Name of the predictor.
    name = ""

    def __init__(self) -> None:
        self.counts = PredictionCounts()

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def add(self, request_id: str, prompt_ids: Sequence[int], at_once: bool = True) -> None:
        pass

    def predict_held(self) -> None:
        pass

    def apply(self, predicted: Callable[[str, float, float], bool], now: float) -> None:
        pass

    def ended(self, request_id: str, tokens: int, reason: str) -> None:
        pass


class PredictionService:
    """Predicts and learns output lengths in a thread of its own.

    A prediction takes a core from the steps, and as long as every request runs soon, its length decides nothing. So
    requests are held, and predicted when their order matters (`Scheduler.order_matters`). `add`, `predict_held`,
    `apply` and `ended` are for the engine's thread and do not block on the predictor. `decode` turns token ids into
    text.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.perf_counter,
        most_waiting: int = MOST_WAITING,
        flush_every: float = FLUSH_EVERY,
    ) -> None:
        self.counts, self.name = PredictionCounts(), predictor.name
        self._predictor, self._decode, self._clock = predictor, decode, clock
        self._learner = predictor if isinstance(predictor, Learner) else None
        self._most_waiting, self._flush_every = most_waiting, flush_every
        self._changed = threading.Condition()
        self._live: dict[str, _Ticket] = {}
        self._held: dict[str, _Ticket] = {}
        self._waiting: deque[_Ticket] = deque()
        self._ready: deque[_Ticket] = deque()
        self._learned: deque[tuple[_Ticket, int]] = deque(maxlen=most_waiting)
        self._paused, self._closing = False, False
        self._failed = False  # the first failure is logged, later ones are not
        self._thread = threading.Thread(target=self._run, name="jaxspec-predictions", daemon=True)

    def programs(self) -> list[tuple[str, Callable[[], None]]]:
        """Compile jobs to run before `warm_up`, as (name, job)."""
        return self._predictor.programs()

    def warm_up(self) -> None:
        """Load the predictor's file and compile what is not compiled yet."""
        self._predictor.warm_up()

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the thread; it must be paused until `warm_up` has ended. Requests may be added meanwhile."""
        with self._changed:
            self._paused = paused
            self._changed.notify()

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Learn and flush what is queued, then stop. May be called twice, and without `start`.

        Waits `timeout` seconds for the thread; after that, a warning says that the last lengths are lost.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._held.clear()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning("the length predictor did not stop within %g s; what it learned last is lost", timeout)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt_ids: Sequence[int], at_once: bool = True) -> None:
        """Queue a request for prediction, or hold it until `predict_held`."""
        with self._changed:
            if self._closing or len(self._waiting) + len(self._held) >= self._most_waiting:
                self.counts.without += 1
                return
            ticket = _Ticket(request_id, prompt_ids[-TOKENS_READ:])
            self._live[request_id] = ticket
            if at_once:
                self._waiting.append(ticket)
                self._changed.notify()
            else:
                self._held[request_id] = ticket

    def predict_held(self) -> None:
        """Predict all held requests that have not ended."""
        if self._held:
            with self._changed:
                self._waiting.extend(self._held.values())
                self._held.clear()
                self._changed.notify()

    def apply(self, predicted: Callable[[str, float, float], bool], now: float) -> None:
        """Pass finished predictions to `predicted(request_id, tokens, now)`, which returns whether the request was
        still there, as `Scheduler.predicted` does."""
        while self._ready:
            ticket = self._ready.popleft()
            current = self._live.get(ticket.request_id) is ticket
            assert ticket.length is not None
            if not (current and predicted(ticket.request_id, ticket.length, now)):
                self.counts.late += 1

    def ended(self, request_id: str, tokens: int, reason: str) -> None:
        """A request has ended with `tokens` output tokens and finish reason `reason`; learn its length.

        A request that was cut at its limit would have generated more, so it is learned only if less was predicted.
        """
        with self._changed:
            self._held.pop(request_id, None)
            if (ticket := self._live.pop(request_id, None)) is None:
                return
            useful = reason == "stop" or (reason == "length" and ticket.length is not None and ticket.length < tokens)
            if self._learner is not None and useful and tokens > 0:
                self._learned.append((ticket, tokens))
                self._changed.notify()

    # -- its own thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        flushed = self._clock()
        while True:
            with self._changed:
                if self._paused:
                    if self._closing:
                        return  # the predictor's file was not loaded, so it must not be overwritten
                    self._changed.wait(self._flush_every)
                    continue
                if not (self._waiting or self._learned or self._closing):
                    self._changed.wait(self._flush_every)
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                learned = [self._learned.popleft() for _ in range(min(BATCH, len(self._learned)))]
                closing = self._closing and not learned
            started = self._clock()
            if batch := [t for t in batch if self._live.get(t.request_id) is t]:
                self._guarded(lambda batch=batch: self._predict(batch), len(batch))
            if learned:
                self._guarded(lambda learned=learned: self._learn(learned), 0)
            ended = self._clock()
            if batch or learned:
                self.counts.seconds += ended - started
            if self._learner is not None and (closing or ended - flushed >= self._flush_every):
                self._guarded(self._learner.flush, 0)
                flushed = ended
            if closing:
                return

    def _guarded(self, work: Callable[[], None], requests: int) -> None:
        """Run `work`; an exception costs `requests` their prediction. The first one is logged with its traceback."""
        try:
            work()
        except Exception:
            with self._changed:
                self.counts.without += requests
            if not self._failed:
                log.exception("the length predictor failed; affected requests run without a prediction")
            self._failed = True

    def _predict(self, batch: list[_Ticket]) -> None:
        for ticket in batch:
            ticket.text = self._decode(ticket.prompt_ids)
        texts = list(dict.fromkeys(t.text for t in batch if t.text is not None))  # once per prompt, also for n > 1
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
