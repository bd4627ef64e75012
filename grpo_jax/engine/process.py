"""A worker process that answers calls: one line of JSON in, one out, each within a time limit.

The protocol is in scripts/vllm_worker.py. Whatever the worker does (it dies, hangs, answers
nonsense), a call ends with its result or with a TrainingError that has the end of what the worker
said on its standard error; the worker is then gone, and what it has started too.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.types import TrainingError

TAIL = 2000  # bytes of the worker's last words that an error shows
GLANCE = 0.5  # seconds between looks at whether the worker is alive
# the other environment's interpreter must not find this one's packages; and needs no key of ours
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "WANDB_API_KEY")


class Worker:
    """The process of `command`, started at once. `log` (appended to) has its standard error.

    environment: variables beside this process's own. Raises TrainingError where there is no such
    program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self._log, self._calls = log, 0
        own = {name: value for name, value in os.environ.items() if name not in DROPPED}
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=own | dict(environment),
                    start_new_session=True,  # Ctrl-C is ours; and it ends with all its children
                )
        except OSError as error:
            raise TrainingError(f"the rollout engine did not start: {error}") from error
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._process)

    def call(self, name: str, seconds: float, **arguments: Any) -> Any:
        """The result of that call, of no more than `seconds`. Raises TrainingError."""
        self._calls += 1
        request = {"id": self._calls, "call": name, "arguments": arguments}
        line = json.dumps(request).encode() + b"\n"
        # a worker that hangs reads nothing, and a full pipe would hold us: a thread can wait there
        threading.Thread(target=_write, args=(self._process, line), daemon=True).start()
        said = self._answer(name, seconds)
        try:
            answer = json.loads(said)
            known = answer["id"] == self._calls and ("result" in answer or "error" in answer)
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise self._failed(f"answered {name!r} with {said[:80]!r}, which is no answer to it")
        if "error" in answer:
            raise self._failed(f"could not do {name!r}: {answer['error']}")
        return answer["result"]

    def _answer(self, name: str, seconds: float) -> bytes:
        """The next line, without its end. Raises TrainingError if there will be none."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                line = self._lines.get(timeout=max(min(left, GLANCE), 0))
                break
            except queue.Empty:
                # a child of a dead worker may keep its output open: that is no sign of life
                if self._process.poll() is not None:
                    line = b""
                    break
                if left <= 0:
                    limit = f"within its time limit of {seconds:g} s"
                    raise self._failed(f"did not answer {name!r} {limit}") from None
        if not line:
            raise self._failed(f"ended in the middle of {name!r} ({self._stopped()})")
        return line.rstrip(b"\n")

    def _stopped(self) -> str:
        try:
            code = self._process.wait(GLANCE)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _failed(self, what: str) -> TrainingError:
        """The error to raise; the worker is no more, since nobody knows what it does."""
        self.close()
        with self._log.open("rb") as file:
            file.seek(max(self._log.stat().st_size - TAIL, 0))
            words = file.read().decode(errors="replace").strip()
        return TrainingError(
            f"the rollout engine {what}; the end of {self._log}:\n{words or '(nothing)'}"
        )


def _read(process: subprocess.Popen, lines: queue.SimpleQueue) -> None:
    """Hand on what the worker says; an empty line is its end."""
    assert process.stdout is not None
    with process.stdout as said:
        for line in said:
            lines.put(line)
    lines.put(b"")


def _write(process: subprocess.Popen, line: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except (OSError, ValueError):  # it is gone: whoever waits for the answer sees that
        pass


def _end(process: subprocess.Popen) -> None:
    """Kill it and what it has started: it holds nothing that anybody needs."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:  # what it has not read
        pass
