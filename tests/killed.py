"""Runs in a process of their own, which end at a moment that a test chooses.

`python -m tests.killed FOLDER MOMENT [key=value ...]` trains what `test_trainer.make` makes of
the overrides. MOMENT: `never`; `logged:N`, killed once step N's row is written, and what is saved
before it; `saving:N`, while checkpoint N is being written; `saved:N`, once it is there;
`terminated:N`, SIGTERM to itself as the rollout of step N begins, and training goes on.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parent.parent
LIMIT = 300  # seconds, after which a process is killed and its test fails


def start(folder: Path, moment: str, *overrides: str, **variables: str) -> subprocess.Popen:
    """Such a process; it finds this one's compiled programs."""
    cache = jax.config.jax_compilation_cache_dir
    found = {} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache}
    found |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    # a W&B service of its own: one of whoever logs here would outlive it, and hold its run's id
    mine = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.killed", str(folder), moment, *overrides],
        cwd=ROOT,
        env=mine | found | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen) -> tuple[int, str]:
    """(return code, what it said), within the limit."""
    try:
        text, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, text


def killed(folder: Path, moment: str, *overrides: str) -> str:
    """What a run that was killed at that moment said."""
    code, text = end(start(folder, moment, *overrides))
    assert code == -signal.SIGKILL, text
    return text


def _arrange(moment: str) -> None:
    from grpo_jax import checkpoint
    from grpo_jax.logging import RunLogger
    from grpo_jax.rollout import Collector

    what, _, number = moment.partition(":")
    log, save, collect = RunLogger.log, checkpoint.save, Collector.collect

    managers = []

    def die() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def logging(self, step, metrics):
        log(self, step, metrics)
        if what == "logged" and step == int(number):
            for manager in managers:
                manager.wait_until_finished()
            die()

    def saving(manager, step, *rest):
        managers[:] = [manager]
        save(manager, step, *rest)
        if what in ("saving", "saved") and step == int(number):
            if what == "saved":
                manager.wait_until_finished()
            die()

    def collecting(self, params, reference, step, *rest):
        if what == "terminated" and step == int(number):
            os.kill(os.getpid(), signal.SIGTERM)
        return collect(self, params, reference, step, *rest)

    RunLogger.log, checkpoint.save, Collector.collect = logging, saving, collecting


def main() -> int:
    from grpo_jax.preemption import EXIT_CODE, Preempted
    from grpo_jax.trainer import train
    from grpo_jax.types import TrainingError
    from tests.test_trainer import make

    folder, moment, *overrides = sys.argv[1:]
    _arrange(moment)
    try:
        train(make(Path(folder), *overrides))
    except Preempted as stopped:
        print(stopped)
        return EXIT_CODE
    except TrainingError as error:
        print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
