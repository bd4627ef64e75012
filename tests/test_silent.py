"""Micro-batches that can't have a gradient are skipped, and nothing else changes."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.learner import make_gradient
from grpo_jax.policy import PolicySettings
from grpo_jax.rules import call, proportional
from tests.fixtures import assert_trees_equal, bigram, make_batch, table

PARAMS = table(np.random.default_rng(3).normal(size=(40, 40)))
CLIPS = sorted(path.stem for path in Path("conf/clip").glob("*.yaml"))


def tied(batch, rows):
    """Those rows without an advantage."""
    return replace(batch, advantage=batch.advantage.at[jnp.asarray(rows)].set(0.0))


def gradient(algorithm, batch, skip, params=PARAMS, model=None):
    settings = PolicySettings(1.0, 2, 40, skip_silent=skip)
    made = make_gradient(algorithm, model or bigram(), settings, group=2)
    return jax.jit(made)(params, batch, None, None, jax.random.key(0))


def poisoned(batch, rows):
    """A model whose gradient is NaN wherever one of those rows is passed through it."""
    bad = np.asarray(batch.rollout.completion)[rows][:, :1]

    def answers(params, prompt, mask, completion):
        hit = jnp.isin(completion[:, :1], bad).any()
        return bigram().answers(params, prompt, mask, completion) * jnp.where(hit, jnp.nan, 1.0)

    return replace(bigram(), answers=answers)


def marked(batch):
    """First tokens that tell the rows apart."""
    first = jnp.arange(len(batch.advantage), dtype=jnp.int32)
    completion = batch.rollout.completion.at[:, 0].set(first)
    return replace(batch, rollout=replace(batch.rollout, completion=completion))


def test_a_tied_group_is_not_passed_through_the_model():
    batch = tied(marked(make_batch()), [2, 3])
    algorithm = load_algorithm("grpo", "kl=none")
    want = gradient(algorithm, batch, skip=False)
    got = gradient(algorithm, batch, skip=True, model=poisoned(batch, [2, 3]))
    assert np.isfinite(float(got[0]))
    sums = want[1] | {name: got[1][name] for name in ("ratio", "seen")}
    assert_trees_equal((want[0], sums, want[2]), got, atol=1e-6, rtol=1e-5)
    # the mean ratio is over what was computed
    tokens = int(batch.rollout.mask[2:4].sum())
    assert int(want[1]["seen"]) - int(got[1]["seen"]) == tokens
    assert int(got[1]["tokens"]) == int(want[1]["tokens"])


@pytest.mark.parametrize("one", [2, 3])
def test_half_a_tied_micro_batch_is_computed(one):
    batch = tied(marked(make_batch()), [one])
    got = gradient(load_algorithm("grpo", "kl=none"), batch, True, model=poisoned(batch, [2, 3]))
    assert np.isnan(float(got[0]))


@pytest.mark.parametrize("why", ["kl=k3", "entropy=bonus", "select=top_entropy", "clip=kl_cov"])
def test_tied_groups_may_matter(why):
    algorithm = load_algorithm("grpo", "kl=none", why)
    assert not algorithm.silent_when_tied
    batch = tied(marked(make_batch()), [2, 3])
    if why != "clip=kl_cov":
        got = gradient(algorithm, batch, True, model=poisoned(batch, [2, 3]))
        assert np.isnan(float(got[0]))
    assert_trees_equal(
        gradient(algorithm, batch, True), gradient(algorithm, batch, False), atol=1e-7
    )


def test_a_group_that_is_not_kept_is_skipped_under_a_kl_too():
    batch = marked(make_batch())
    batch = replace(batch, keep=batch.keep.at[jnp.array([2, 3])].set(False))
    algorithm = load_algorithm("grpo", "kl=k3")
    want = gradient(algorithm, batch, skip=False)
    got = gradient(algorithm, batch, skip=True, model=poisoned(batch, [2, 3]))
    assert_trees_equal(want, got, atol=1e-6, rtol=1e-5)


def test_a_foreign_clip_is_never_skipped():
    def clip(log_ratio, advantage, logp, mask):
        return logp, mask

    algorithm = replace(load_algorithm("grpo", "kl=none"), clip=clip)
    assert not algorithm.silent_when_tied
    batch = tied(marked(make_batch()), range(8))
    assert float(gradient(algorithm, batch, True)[0]) != 0


@pytest.mark.parametrize("name", CLIPS)
def test_every_clip_of_ours_is_silent_without_an_advantage(name):
    algorithm = load_algorithm("grpo", "kl=none", f"clip={name}")
    assert proportional(algorithm.clip)
    if algorithm.sees_all_rows:
        return  # shown all rows at once, and never skipped
    rng = np.random.default_rng(0)
    log_ratio, logp = (jnp.asarray(rng.normal(0, s, (3, 5)), jnp.float32) for s in (0.5, 2))
    mask, ones = jnp.ones((3, 5), bool), jnp.ones((3, 5))

    def objective(x, advantage):
        made, _ = call(
            algorithm.clip, log_ratio + x, advantage, logp + x, mask, correction=ones, key=None
        )
        return made.sum()

    for advantage, silent in ((0.0, True), (1.0, False)):
        # GMPO and others may hold every token back on one side: then the other side moves
        values = [
            jax.grad(objective)(x, jnp.full((3, 1), advantage * s)) for s in (1, -1) for x in (0.0,)
        ]
        assert (max(abs(float(v)) for v in values) == 0) == silent
