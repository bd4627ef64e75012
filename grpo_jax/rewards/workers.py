"""Run a function on many items in worker processes that can be killed, within a bound on time.

For scorers that may hang, eat memory or crash on what a model wrote. A thin layer over pebble's
process pool:

- Workers are spawned, not forked, and import what the function needs and nothing of the caller's
  script: no jax, no accelerator.
- **Alarm, then axe.** An item gets `seconds`: first an alarm inside the worker ends it, which costs
  the worker nothing; an item that doesn't hear the alarm (one long operation in C) is killed with
  its worker `GRACE` later, and the worker is replaced, which takes seconds.
- **Nobody waits behind a slow item**, where `first_seconds` are given, far more than an honest item
  needs: each item has a first try, of so much computing or twice as long by the clock (a machine
  may be busy), and what isn't done by then a second one, of `seconds`, once all others have had
  their first. No second try begins later than `seconds` after that. So items that never end cost a
  call one or two first tries' time for each that a worker has, and one or two items' `seconds`.
- **A bound for the call**, whatever its items do: `batch_seconds`, from its turn to its return, but
  for the first start of the workers. Then everything that still runs is killed, which takes about
  half a second more, and what has no result is a `Failure`.
- **Caps on each worker**: address space (`memory_mb`), CPU seconds for each item (so that a worker
  ends even if its parent is gone), no files written, no core dumps, nothing printed.
- Results come in the order of the items: a value, or a `Failure` that says what happened.

The pool starts with its first call, serves all later ones, and is closed at exit; an exception or
Ctrl-C in the caller during a call kills the workers at once. Calls may come from any thread; they
take turns. The caller's own signal handlers and alarms are never touched. POSIX only.
"""

import atexit
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from grpo_jax.rewards.spawning import BareContext

GRACE = 1.0  # seconds between the alarm inside a worker and its end
_AGAIN = 0.2  # seconds between alarms, for code that swallows the first one
_START = 60.0  # seconds to wait for the first worker
_SHARE, _REST = 0.5, 15.0  # seconds of a call: for each item of a worker, and beside its items
_SHOWN = 200  # characters of an exception's text


@dataclass(frozen=True)
class Failure:
    """The scorer, not the answer, failed on a row.

    It scores `value` (None: unscorable) and is counted apart from right, wrong and unscorable rows.
    """

    text: str  # what happened, for the log
    value: float | None = None
    kind: str = "error"  # "timeout", "crash" (the worker died) or "error" (an exception)


@dataclass(frozen=True)
class Limits:
    """Of a pool of workers."""

    workers: int | None = None  # None: one a core, 8 at most
    seconds: float = 3.0  # for one item
    batch_seconds: float | None = None  # for all items of a call: the bound; None: by their number
    memory_mb: int = 1024  # address space of a worker, its libraries included
    first_seconds: float | None = None  # of computing, for an item's first try; None: there is none

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: at least 1 (null: one a core, 8 at most)")
        if not 0 < self.seconds < self.bound(1):
            raise ValueError(
                f"seconds={self.seconds:g} and batch_seconds={self.bound(1):g}: above 0, and one "
                "row gets less time than all of them"
            )
        if self.first_seconds is not None and not 0 < self.first_seconds <= self.seconds:
            raise ValueError(
                f"first_seconds={self.first_seconds:g}: above 0, and at most seconds="
                f"{self.seconds:g} (null: no first tries)"
            )
        if self.memory_mb < 256:
            raise ValueError(f"memory_mb={self.memory_mb}: at least 256, a bare worker takes 100")

    @property
    def processes(self) -> int:
        return min(os.cpu_count() or 1, 8) if self.workers is None else self.workers

    def bound(self, items: int) -> float:
        """Seconds for a call with so many items."""
        if self.batch_seconds is not None:
            return self.batch_seconds
        return _SHARE * -(-items // self.processes) + 2 * self.seconds + _REST


@dataclass(frozen=True)
class _Call:
    function: Callable[[Any], Any]
    items: Sequence[Any]
    results: list[Any]  # filled as they come
    deadline: float


class Workers:
    """A pool. `prepare` (a function of a module) runs in each worker before its first item: slow
    imports belong there, outside every item's time."""

    def __init__(self, limits: Limits, prepare: Callable[[], None] | None = None) -> None:
        self.limits = limits
        self._prepare = prepare
        self._turn = threading.Lock()
        self._pool: Any = None
        self._context = BareContext()
        self._owner = 0  # process that started the pool; a fork of it has the object, not the pool
        self._answered = False  # since the pool started

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function(item)` for each item -> its value, or a `Failure` where there is none.

        `function` is one of a module, and items and values can be pickled. An exception's text
        reaches the caller only as far as it is text already: values are never printed.

        Raises RuntimeError if workers die as they start, which is no item's fault.
        """
        if not items:
            return []
        bound = self.limits.bound(len(items))
        late = f"not scored within {bound:g} s, the limit for a batch"
        results: list[Any] = [Failure(late, kind="timeout")] * len(items)
        if not self._turn.acquire(timeout=bound):
            return results
        finished = False
        try:
            self._await_start()
            finished = self._run(_Call(function, items, results, time.monotonic() + bound))
        finally:
            if not finished:  # something still runs: late, or the caller was interrupted
                self._discard()
            self._turn.release()
        return results

    def close(self) -> None:
        """End the workers. A later call starts new ones."""
        with self._turn:
            self._discard()

    def _await_start(self) -> None:
        """Until a worker can work, so that its imports are outside every item's time."""
        if self._pool is None or not self._answered or self._owner != os.getpid():
            future = self._submit(_nothing, None, None)
            wait([future], _START)
            if future.done() and isinstance(future.exception(), BrokenProcessPool):
                self._replace_pool()

    def _run(self, call: _Call) -> bool:
        """Whether all have a result; False: the deadline has come."""
        first = self.limits.first_seconds
        late = list(range(len(call.items)))
        if first is not None:
            unscored = call.results[0]
            late = self._try(call, late, first)
            for number in late or ():
                call.results[number] = unscored
        return late is not None and self._try(call, late, None) is not None

    def _try(self, call: _Call, numbers: Sequence[int], first: float | None) -> list[int] | None:
        """Try those items, for `first` seconds of computing or for as long as one may take -> those
        that an alarm ended; None: the deadline has come."""
        pending, running, late = deque(numbers), dict[Future, int](), list[int]()
        broken = dict.fromkeys(numbers, 0)  # times that a worker ended around the item
        again = first is None and self.limits.first_seconds is not None
        until = time.monotonic() + self.limits.seconds if again else math.inf
        # what is queued can't be taken back: one for each worker, or none where tries are long
        most = (1 if again else 2) * self.limits.processes
        while pending or running:
            while pending and len(running) < most and time.monotonic() < until:
                number = pending.popleft()
                running[self._submit(call.function, call.items[number], first)] = number
            if not running:
                break
            done, _ = wait(running, max(call.deadline - time.monotonic(), 0), FIRST_COMPLETED)
            if not done:
                return None
            ended = False
            for future in done:
                number = running.pop(future)
                if _is_innocent(future.exception()):
                    # a worker died between two items: the pool ends with all it held
                    ended |= isinstance(future.exception(), BrokenProcessPool)
                    broken[number] += 1
                    if broken[number] < 3:
                        pending.append(number)
                    else:
                        call.results[number] = Failure("the worker died", kind="crash")
                    continue
                result = call.results[number] = self._result(future, first or self.limits.seconds)
                self._answered = True
                if future.exception() is None and isinstance(result, Failure):
                    late += [number] * (result.kind == "timeout")
            if ended:
                self._replace_pool()
        for number in pending:
            text = f"over {self.limits.first_seconds:g} s, in a batch with too many such rows"
            call.results[number] = Failure(text, kind="timeout")
        return late

    def _submit(self, function: Callable[[Any], Any], item: Any, first: float | None) -> Future:
        most = self.limits.seconds
        computing, seconds = (most, most) if first is None else (first, min(2 * first, most))
        arguments = (function, item, computing, seconds)
        for _ in range(3):
            pool = self._started()
            try:
                return pool.schedule(_alarmed, args=arguments, timeout=seconds + GRACE)
            except RuntimeError:  # it broke while it was idle, and says so now
                self._replace_pool()
        raise RuntimeError(_STILLBORN)

    def _result(self, future: Future, seconds: float) -> Any:
        from pebble import ProcessExpired

        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            late = f"over {seconds:g} s; the worker was killed"
            return Failure(late, kind="timeout")
        if isinstance(error, ProcessExpired):
            return Failure(f"the worker died (exit code {error.exitcode})", kind="crash")
        return Failure(_told(error))

    def _started(self) -> Any:
        if self._pool is not None and self._owner == os.getpid():
            return self._pool
        from pebble import ProcessPool

        self._context = BareContext()
        self._pool = ProcessPool(
            self.limits.processes,
            initializer=_begin,
            initargs=(self.limits.memory_mb, self._prepare),
            context=self._context,
        )
        self._owner, self._answered = os.getpid(), False
        atexit.unregister(self._discard)
        atexit.register(self._discard)
        # a process that multiprocessing started ends without `atexit`, and would wait for workers
        Finalize(None, self._discard, exitpriority=1)
        return self._pool

    def _replace_pool(self) -> None:
        if not self._answered:
            self._discard()
            raise RuntimeError(_STILLBORN)
        self._discard()

    def _discard(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            pool.stop()
            self._context.kill()  # before pebble takes away what a starting one still reads
            pool.join()


def _is_innocent(error: BaseException | None) -> bool:
    """Whether the worker did not die of its item. SIGTERM comes from outside: a cluster that takes
    a machine away sends it to every process, and the step at hand is still finished."""
    told_to_end = getattr(error, "exitcode", None) == -signal.SIGTERM
    return isinstance(error, BrokenProcessPool) or told_to_end


_STILLBORN = (
    "worker processes of a reward end as they start: the text above says why, or memory_mb is too "
    "low for what they import"
)

# ---------------------------------------------------------------------------- inside a worker

_armed = False


class _LateError(BaseException):
    """The alarm. No Exception: libraries that swallow those must not swallow this."""


def _begin(memory_mb: int, prepare: Callable[[], None] | None) -> None:
    # pebble's handler needs the interpreter, which code in C keeps to itself: SIGTERM just ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _ring)
    signal.signal(signal.SIGPROF, _ring)
    _cap(resource.RLIMIT_CORE, 0)
    _cap(resource.RLIMIT_AS, memory_mb * 2**20)
    if prepare is not None:
        prepare()
    # From here on nothing a model wrote is printed: by a warning, a parser, a crash
    logging.disable(logging.CRITICAL)
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _cap(resource.RLIMIT_FSIZE, 0)


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _ring(*_: Any) -> None:
    if _armed:
        raise _LateError


def _nothing(_: None) -> None:
    """What a worker does to show that it can."""


def _alarmed(function: Callable[[Any], Any], item: Any, computing: float, seconds: float) -> Any:
    """`function(item)`, or a `Failure` after so many seconds, of this process or by the clock.
    Never raises."""
    global _armed
    used = resource.getrusage(resource.RUSAGE_SELF)
    _cap(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds + GRACE) + 2)
    try:
        _armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        signal.setitimer(signal.ITIMER_PROF, computing, _AGAIN)
        try:
            return function(item)
        finally:
            _armed = False
    except _LateError:
        return Failure(f"over {computing:g} s", kind="timeout")
    except Exception as error:
        return Failure(_told(error))
    finally:
        _armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _told(error: BaseException) -> str:
    """An exception in words. What it holds beside text is left alone: printing it may never end."""
    words = [argument[:_SHOWN] for argument in error.args if isinstance(argument, str)]
    return ": ".join([type(error).__name__, *words])
