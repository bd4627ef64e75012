"""A reference that moves (`kl.refresh_every`, `kl.refresh_mix`): when, by how much, and after a
resume."""

import jax
import numpy as np
import pytest

from grpo_jax.logging import RunLogger
from tests.fixtures import assert_trees_equal
from tests.test_trainer import Killed, launch, programs, rows  # noqa: F401

pytestmark = pytest.mark.core

MOVING = (
    "algorithm=grpo",
    "kl.refresh_every=2",
    "train.steps=4",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "eval.every=0",
    "eval.greedy=false",
    "optim.warmup_updates=0",
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """(folder, saved states) of a run whose reference moves after its rollouts 2 and 4."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    return folder, launch(folder, *MOVING)


def test_the_reference_moves_after_every_second_rollout_by_its_share(moved):
    _, saved = moved
    first, second, third, fourth = (saved[step] for step in (1, 2, 3, 4))

    def mixed(policy, reference):
        return jax.tree.map(lambda p, r: 0.6 * p + 0.4 * r, policy, reference)

    leaves = map(jax.tree.leaves, (first.trainable, first.reference))
    far = [np.abs(a - b).max() for a, b in zip(*leaves, strict=True)]
    assert max(far) > 1e-3  # the policy has left it
    close = {"rtol": 1e-6, "atol": 1e-7}
    assert_trees_equal(second.reference, mixed(second.trainable, first.reference), **close)
    assert_trees_equal(third.reference, second.reference)
    assert_trees_equal(fourth.reference, mixed(fourth.trainable, third.reference), **close)


def test_the_loss_feels_where_the_reference_is(moved, tmp_path):
    still = launch(tmp_path / "still", *MOVING, "kl.refresh_every=0", "train.steps=3")
    assert still[3].reference is None
    whole = launch(tmp_path / "whole", *MOVING, "kl.refresh_mix=1", "train.steps=3")
    assert_trees_equal(whole[2].reference, whole[2].trainable)
    tables = [rows(folder) for folder in (moved[0], tmp_path / "still", tmp_path / "whole")]
    for step, apart in ((1, False), (2, False), (3, True)):
        kl = [table[step]["kl"] for table in tables]
        assert (len(set(kl)) == 3) == apart, (step, kl)
    at = [table[3]["kl"] for table in tables]
    assert at[1] > at[0] > at[2]  # the nearer the reference, the smaller


def test_a_killed_run_goes_on_with_its_own_reference_bit_for_bit(moved, tmp_path):
    folder, saved = moved
    log = RunLogger.log

    def logging(self, step, metrics):
        log(self, step, metrics)
        if step == 4:  # after the checkpoint of step 3, whose reference is no one's beginning
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "log", logging)
        with pytest.raises(Killed):
            launch(tmp_path / "run", *MOVING)
    rest = launch(tmp_path / "run", *MOVING)
    assert sorted(rest) == [4]
    assert_trees_equal(rest[4], saved[4])
    assert rows(tmp_path / "run") == rows(folder)
