"""Runs of several processes on this machine, one of which ends as a test says.

`python -m tests.joined MOMENT [key=value ...]` is scripts/train.py in a process that something
happens to at MOMENT: `never`; or WHAT:N or WHAT-scoring:N, as step N's rollout begins, or before
its rewards are scored. WHAT: `killed`, `terminated` (SIGTERM), `raised` (an error no one expects).
"""

import faulthandler
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from tests.test_trainer import SMALL

ROOT = Path(__file__).parent.parent
LIMIT = 200  # seconds, after which every process is killed and the test fails


@dataclass(frozen=True)
class Ended:
    code: int
    text: str  # standard output and error
    after: float  # seconds since the first process of all ended


def run(
    folder: Path,
    *overrides: str,
    moments: Sequence[str] = ("never", "never"),
    devices: int = 1,
    own: Sequence[Sequence[str]] | None = None,
    **variables: str,
) -> list[Ended]:
    """As many processes as there are moments, with so many devices each -> how each ended.

    `own`: overrides of each process alone. What they say is kept beside the folder (said.N).
    """
    given = {"cache": f"cache={folder.parent}/cache", "hydra.run.dir": f"hydra.run.dir={folder}"}
    given |= {word.partition("=")[0]: word for word in (*SMALL, *overrides)}
    words = [*given.values(), "mesh.distributed=true"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if "device_count" not in f]
    flags += [f"--xla_force_host_platform_device_count={devices}"]
    # NPROC: XLA's threads; with those of two cores, collectives of two processes block each other
    shared = {"NPROC": "8", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    shared |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(moments))}
    # programs are kept, however quickly they compile
    shared |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    shared |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    processes, said = [], []
    try:
        for number, moment in enumerate(moments):
            said.append((folder.parent / f"said.{number}").open("w+"))
            extra = own[number] if own else ()
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.joined", moment, *words, *extra],
                    cwd=ROOT,
                    env=os.environ | shared | {"JAX_PROCESS_ID": str(number)} | variables,
                    stdout=said[-1],
                    stderr=subprocess.STDOUT,
                )
            )
        return _ends(processes, said)
    finally:
        for process in processes:
            process.kill()
        for file in said:
            file.close()


def _ends(processes: list[subprocess.Popen], said: list) -> list[Ended]:
    since, ends = time.monotonic(), {}
    while len(ends) < len(processes):
        now = time.monotonic()
        for number, process in enumerate(processes):
            if number not in ends and process.poll() is not None:
                ends[number] = now
        if now - since > LIMIT:
            texts = [Path(file.name).read_text()[-8000:] for file in said]
            raise AssertionError(f"still at work after {LIMIT} s; they said {texts}")
        time.sleep(0.05)
    first = min(ends.values())
    return [
        Ended(process.returncode, Path(file.name).read_text(), ends[number] - first)
        for number, (process, file) in enumerate(zip(processes, said, strict=True))
    ]


def _arrange(moment: str) -> None:
    from grpo_jax import answers
    from grpo_jax.rollout import Collector

    what, _, number = moment.partition(":")
    what, _, scoring = what.partition("-")
    collect, score, steps = Collector.collect, answers.score, []

    def act() -> None:
        sys.stdout.flush()
        if what == "raised":
            raise RuntimeError("a defect that shows in one process")
        os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGTERM)

    def collecting(self, params, reference, step, *rest):
        steps.append(step)
        if str(step) == number and not scoring:
            act()
        return collect(self, params, reference, step, *rest)

    def scored(*given):
        if scoring and steps and str(steps[-1]) == number:
            act()
        print(f"scored {len(given[1])} rows")
        return score(*given)

    Collector.collect, answers.score = collecting, scored


def main() -> None:
    moment, *words = sys.argv[1:]
    faulthandler.dump_traceback_later(LIMIT - 10)  # what it waits for, should it come to that
    _arrange(moment)
    script = ROOT / "scripts" / "train.py"
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    assert not jax.distributed.is_initialized()
    main()
