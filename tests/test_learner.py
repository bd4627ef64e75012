"""learner.py: what an optimizer step does with a minibatch, however cut, and when it must not."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from grpo_jax.kernels import clip
from grpo_jax.learner import UPDATE, make_update, minibatches
from grpo_jax.loss import policy_loss
from grpo_jax.optim import OptimSettings, make_optimizer
from grpo_jax.policy import PolicySettings, cut, make_logprobs, token_stats
from tests.cases import AGGREGATION, AXES, CORRECTION, KL, SELECT, make_algorithm
from tests.fixtures import (
    assert_trees_equal,
    bigram,
    make_batch,
    make_state,
    small_llama,
    snapshot,
)

ALL = jnp.arange(8)
GRPO = make_algorithm()


@cache
def policy():
    return bigram(), bigram().init(jax.random.key(3))


def settings(micro=2, chunk=64, temperature=1.0):
    return PolicySettings(temperature, micro_batch_rows=micro, vocab_chunk=chunk)


def adam():
    plain = OptimSettings(0.01, "constant", 0, 1.0, 0.9, 0.99, 1e-8, 0.01, 1.0)
    return make_optimizer(plain, optax.constant_schedule(0.01))


def on_policy(batch, model, params, **choice):
    """The batch as the collector makes it: old log-probs are the trainer's own."""
    old_logp, _ = make_logprobs(model, settings(**choice))(params, batch.rollout)
    return replace(batch, old_logp=old_logp)


# -------------------------------------------------------------------------------- micro-batches


# every rule that compares rows, and what needs more than log-probs; every aggregation is in
# tests/test_invariance.py
CUT = {
    name: {"aggregation": AGGREGATION[name], "kl": KL["k3"]} for name in ("prompt_mean", "local")
}
CUT |= {
    f"{axis}={name}": {axis: value, "kl": KL["k3"]}
    for axis, values in AXES.items()
    for name, value in values.items()
    if axis != "kl" and make_algorithm(**{axis: value}).sees_all_rows
}
CUT["kl=exact"] = {"kl": KL["exact"], "entropy": AXES["entropy"]["bonus"]}
CUT["together"] = {
    "kl": KL["exact"],
    "entropy": AXES["entropy"]["bonus"],
    "select": SELECT["top_entropy"],
    "correction": CORRECTION["batch_normalised"],
}


@pytest.mark.parametrize("name", CUT)
def test_micro_batches_change_neither_gradient_nor_metrics(name):
    model, params = policy()
    reference = model.init(jax.random.key(8))
    batch = make_batch()
    algorithm = make_algorithm(**CUT[name])
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), UPDATE), 0)

    def whole(params):
        mask = batch.rollout.mask & batch.keep[:, None]
        stats = token_stats(model, settings(), params, batch.rollout, reference)
        return policy_loss(
            algorithm,
            stats.logp,
            old_logp=batch.old_logp,
            sampler_logp=batch.rollout.sampler_logp,
            ref_logp=batch.ref_logp,
            advantage=batch.advantage,
            mask=mask,
            weight=algorithm.aggregation(mask, batch.group),
            entropy=stats.entropy,
            exact_kl=stats.exact_kl,
            key=key,
        )[0]

    value, gradient = jax.jit(jax.value_and_grad(whole))(params)
    assert optax.tree.norm(gradient) > 0.01
    for micro in (2, 64):  # more than there are is all of them
        sgd = optax.sgd(1.0)  # parameters move by the gradient itself
        update = make_update(algorithm, model, sgd, settings(micro))
        state = make_state(params, sgd)
        state, metrics = update(state, batch, ALL, None, reference)
        moved = jax.tree.map(jnp.subtract, params, state.trainable)
        assert_trees_equal(moved, gradient, atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (3, 2), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_micro_batches_are_as_large_as_fits(most, rows):
    (micro,) = cut((jnp.arange(16).reshape(8, 2),), most)
    assert micro.shape == (8 // rows, rows, 2)
    np.testing.assert_array_equal(micro.reshape(8, 2), jnp.arange(16).reshape(8, 2))


def test_no_logits_of_a_whole_micro_batch_exist():
    vocabulary, micro = 1000, 4
    params = jax.random.normal(jax.random.key(0), (vocabulary, 4))
    params = {"embed": {"embedding": params}, "head": {"embedding": params}}
    batch, sgd = make_batch(vocab=vocabulary), optax.sgd(1.0)
    update = make_update(GRPO, bigram(), sgd, settings(micro, chunk=10))
    program = jax.make_jaxpr(update)(make_state(params, sgd), batch, ALL)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (getattr(v.aval, "size", 0) for v in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    logits = micro * batch.rollout.mask.shape[1] * vocabulary
    assert params["head"]["embedding"].size <= max(sizes(program.jaxpr)) < logits / 2


# ------------------------------------------------------------------------- minibatches, donation


def test_minibatches_cover_every_row_once_an_epoch_in_whole_groups():
    rng = np.random.default_rng(0)
    steps = minibatches(rows=12, group_size=2, epochs=3, count=3, rng=rng)
    assert len(steps) == 9 and all(len(step) == 4 for step in steps)
    orders = []
    for epoch in range(3):
        rows = np.concatenate(steps[3 * epoch : 3 * epoch + 3])
        assert sorted(rows.tolist()) == list(range(12))
        pairs = rows.reshape(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
        orders.append(tuple(rows.tolist()))
    assert len(set(orders)) == 3  # shuffled anew
    again = minibatches(12, 2, 3, 3, np.random.default_rng(0))
    np.testing.assert_array_equal(steps, again)


def test_one_minibatch_is_the_whole_rollout():
    (rows,) = minibatches(8, 4, 1, 1, np.random.default_rng(1))
    assert sorted(rows.tolist()) == list(range(8)) and rows.dtype == np.int32


def test_only_the_rows_asked_for_count():
    model, params = policy()
    update = make_update(GRPO, model, optax.sgd(1.0), settings())
    batch, rows = make_batch(), jnp.array([4, 5, 0, 1])
    other = jnp.array([2, 3, 6, 7])
    poisoned = replace(batch, advantage=batch.advantage.at[other].set(jnp.nan))
    results = [update(make_state(params, optax.sgd(1.0)), b, rows) for b in (batch, poisoned)]
    assert_trees_equal(*[snapshot(state.trainable) for state, _ in results])
    assert not results[1][1]["nonfinite"]


def test_the_state_is_donated():
    model, params = policy()
    state = make_state(params, adam())
    new, _ = make_update(GRPO, model, adam(), settings())(state, make_batch(), ALL)
    gone = [a.is_deleted() for a in jax.tree.leaves((state.trainable, state.opt_state))]
    assert all(gone)
    assert int(new.step) == 1
    assert (jax.random.key_data(new.key) == jax.random.key_data(jax.random.key(0))).all()


# -------------------------------------------------------------------------- steps that must not be


def sick_gradient(log_ratio, advantage, logp, mask):
    """A finite objective with an infinite gradient."""
    return jnp.sqrt(jnp.abs(logp - logp)) + 0 * log_ratio, jnp.zeros_like(mask)


@pytest.mark.parametrize("cause", ["advantage", "old_logp", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(cause):
    """Case L9: kyutai-labs/pocket-tts#262, miles#2078, google-deepmind/optax#1746."""
    model, params = policy()
    algorithm = make_algorithm(clip=sick_gradient) if cause == "gradient" else GRPO
    healthy = make_update(GRPO, model, adam(), settings())
    state, metrics = healthy(make_state(params, adam()), make_batch(), ALL)
    assert not metrics["nonfinite"] and not metrics["empty"]
    before = snapshot(state)
    batch = make_batch()
    if cause == "advantage":
        batch = replace(batch, advantage=batch.advantage.at[0].set(jnp.inf))
    if cause == "old_logp":
        batch = replace(batch, old_logp=batch.old_logp.at[0, 0].set(jnp.nan))
    update = make_update(algorithm, model, adam(), settings()) if cause == "gradient" else healthy
    state, metrics = update(state, batch, ALL)
    assert metrics["nonfinite"] and not metrics["empty"]
    assert jnp.isfinite(metrics["loss"]) == (cause == "gradient")
    after = snapshot(state)
    assert after.step == 2  # tried
    assert_trees_equal(after.trainable, before.trainable)
    assert_trees_equal(after.opt_state, before.opt_state)
    if cause != "gradient":  # and the run can go on
        state, metrics = update(state, make_batch(), ALL)
        assert not metrics["nonfinite"]


def test_a_step_without_a_token_changes_nothing_and_says_so():
    model, params = policy()
    update = make_update(GRPO, model, adam(), settings())
    state, _ = update(make_state(params, adam()), make_batch(), ALL)  # Adam has momentum now
    before = snapshot(state)
    batch = make_batch()
    state, metrics = update(state, replace(batch, keep=jnp.zeros(8, bool)), ALL)
    assert metrics["empty"] and not metrics["nonfinite"]
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert_trees_equal(snapshot(state.trainable), before.trainable)
    assert_trees_equal(snapshot(state.opt_state), before.opt_state)


def test_rows_that_are_not_kept_have_no_say():
    model, params = policy()
    update = make_update(GRPO, model, optax.sgd(1.0), settings())
    batch = make_batch()  # its last row is not kept
    changed = replace(
        batch,
        advantage=batch.advantage.at[-1].set(jnp.nan),
        old_logp=batch.old_logp.at[-1].set(jnp.nan),
    )
    results = [update(make_state(params, optax.sgd(1.0)), b, ALL) for b in (batch, changed)]
    assert_trees_equal(*[snapshot(state.trainable) for state, _ in results])


# ----------------------------------------------------------------------------- precision


def test_masters_are_float32_when_the_matmuls_are_not():
    """Case L10: workofart/ml-by-hand#85, AReaL#1634 (100 updates of -6e-4 left bfloat16 at 1.0)."""
    model = bigram("bfloat16")
    ones = jax.tree.map(jnp.ones_like, policy()[1])
    # -6e-4 is below half a step of bfloat16 at 1, so a bfloat16 master would stay there
    push = optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.full_like(g, -6e-4), grads))
    update = make_update(GRPO, model, push, settings())
    state, batch = make_state(ones, push), make_batch()
    for _ in range(100):
        state, metrics = update(state, batch, ALL)
    leaf = state.trainable["head"]["embedding"]
    assert leaf.dtype == jnp.float32 and metrics["loss"].dtype == jnp.float32
    np.testing.assert_allclose(leaf, 0.94, atol=1e-5)
    np.testing.assert_array_equal(jnp.ones(3, jnp.bfloat16) - jnp.bfloat16(6e-4), 1)


def test_moments_and_logprobs_are_float32_when_the_matmuls_are_not():
    model, params = bigram("bfloat16"), policy()[1]
    batch = on_policy(make_batch(), model, params)
    assert batch.old_logp.dtype == jnp.float32
    update = make_update(GRPO, model, adam(), settings())
    state, metrics = update(make_state(params, adam()), batch, ALL)
    assert {a.dtype.name for a in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}
    np.testing.assert_allclose(metrics["ratio_mean"], 1, atol=1e-6)


# ------------------------------------------------------------------------------- ratios


def test_the_first_update_has_ratio_one_and_a_gradient_and_the_second_moves_away():
    model, params = small_llama()
    batch = on_policy(make_batch(), model, params, temperature=0.7)
    update = make_update(GRPO, model, adam(), settings(temperature=0.7))
    first, second = jnp.array([0, 1, 4, 5]), jnp.array([2, 3, 6, 7])
    state, metrics = update(make_state(params, adam()), batch, first)
    np.testing.assert_allclose(metrics["ratio_mean"], 1, atol=1e-6)
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0
    assert metrics["grad_norm"] > 1e-3
    state, metrics = update(state, batch, second)
    assert abs(metrics["ratio_mean"] - 1) > 1e-4
    # back on the first rows, some tokens have left the range
    for _ in range(20):
        state, metrics = update(state, batch, first)
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize(
    ("name", "want"), [("sequence_mean", 0.0), ("token_mean", 0.5), ("constant", 0.25)]
)
def test_the_loss_at_ratio_one_by_hand(name, want):
    # advantages +1 and -1, lengths 1 and 3; the constant is 4
    model, params = policy()
    batch = make_batch(prompts=1)
    batch = replace(
        batch,
        rollout=replace(batch.rollout, mask=jnp.arange(6) < jnp.array([[1], [3]])),
        advantage=jnp.array([1.0, -1.0]),
        keep=jnp.ones(2, bool),
    )
    batch = on_policy(batch, model, params)
    constant = partial(AGGREGATION["constant"].func, length=4)
    rule = constant if name == "constant" else AGGREGATION[name]
    update = make_update(make_algorithm(aggregation=rule), model, optax.sgd(1.0), settings())
    _, metrics = update(make_state(params, optax.sgd(1.0)), batch, jnp.arange(2))
    np.testing.assert_allclose(metrics["loss"], want, atol=1e-6)
    assert metrics["grad_norm"] > 0.01


def test_clip_fractions_and_kl_are_means_over_tokens():
    model, params = policy()
    batch = on_policy(make_batch(prompts=2), model, params)
    mask = np.asarray(batch.rollout.mask) & np.array([[1], [1], [1], [0]], bool)
    shift = jnp.array([0.5, -0.5, 0.5, 0.0])[:, None]  # log ratios
    advantage = jnp.array([1.0, -1.0, -1.0, 1.0])
    batch = replace(
        batch,
        old_logp=batch.old_logp - shift,
        ref_logp=batch.old_logp - 0.5,
        advantage=advantage,
    )
    algorithm = make_algorithm(clip=partial(clip.bounded, low=0.2, high=0.2), kl=KL["k1"])
    update = make_update(algorithm, model, optax.sgd(1.0), settings())
    _, metrics = update(make_state(params, optax.sgd(1.0)), batch, jnp.arange(4))
    length = mask.sum(1)
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], length[0] / length.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_ratio/low_mean"], length[1] / length.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], 0.5, rtol=1e-5)
