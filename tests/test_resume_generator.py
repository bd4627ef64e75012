"""A run goes on with the random numbers that it began with, or not at all; signals in between."""

import os
import signal

import jax
import pytest

from grpo_jax.preemption import asked, heard
from grpo_jax.types import TrainingError
from tests.test_trainer import contents, launch, programs, rows  # noqa: F401

QUICK = ("eval.every=0", "eval.greedy=false", "eval.prompts=2", "checkpoint.every=1")


@pytest.fixture
def partitionable():
    yield lambda on: jax.config.update("jax_threefry_partitionable", on)
    jax.config.update("jax_threefry_partitionable", True)


@pytest.mark.core
def test_another_generator_is_refused(tmp_path, partitionable):
    launch(tmp_path / "run", "train.steps=1", *QUICK)
    before = contents(tmp_path / "run")
    partitionable(False)
    with pytest.raises(TrainingError, match=r"'partitionable': True.*'partitionable': False"):
        launch(tmp_path / "run", "train.steps=2", *QUICK)
    kept = {path for path, text in contents(tmp_path / "run").items() if before.get(path) == text}
    assert tmp_path / "run" / "metrics.jsonl" in kept and tmp_path / "run" / "DONE.json" in kept
    partitionable(True)
    launch(tmp_path / "run", "train.steps=2", *QUICK)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]


def test_whoever_waits_for_usr2_gets_it_once_the_state_is_saved():
    """submitit does, near a job's end, and then puts it back into the queue."""
    told = []

    def queue(number, frame):
        told.append(asked())
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR2, queue)
    try:
        with pytest.raises(SystemExit, match="7"), heard():
            assert not asked()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert asked() and told == []
        assert told == [True] and signal.getsignal(signal.SIGUSR2) is queue
        with heard():  # and it isn't told again
            pass
        assert told == [True]
    finally:
        signal.signal(signal.SIGUSR2, before)
    with heard():  # nobody listens: it is left alone
        assert signal.getsignal(signal.SIGUSR2) is before
