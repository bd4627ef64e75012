"""What experiments/clip_higher and experiments/gspo_clip_fraction rest on, in small."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.models import tabular_bandit, tabular_chain
from grpo_jax.types import Rollout

pytestmark = pytest.mark.core

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_run", EXPERIMENTS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


higher, gspo = load("clip_higher"), load("gspo_clip_fraction")


def test_with_one_update_a_rollout_all_clips_are_the_same_to_the_last_digit(monkeypatch):
    monkeypatch.setattr(higher, "STEPS", 4)
    found = higher.simulate(higher.ONCE, seeds=2)
    for metric in (higher.REWARD, higher.ENTROPY):
        curves = found[metric]
        np.testing.assert_array_equal(curves, np.broadcast_to(curves[:1], curves.shape))
        assert (np.diff(curves[0]) != 0).all()  # something was learnt
    held = found["top"].mean((1, 2))  # counted after the update, where the clips do differ
    assert held[-1] == 0 and (np.diff(held[:-1]) < 0).all()


def test_the_share_and_probability_of_tokens_held_back_at_the_top():
    """Ratio 3 against ceilings: tokens 1 and 2 have a reward, and token 1 alone has risen."""
    algorithm = load_algorithm("grpo", "kl=none")
    new, *batch = moved_bandit()

    @jax.jit
    def held(high):
        return higher.make_loss(higher.clipped_at(algorithm, 0.2, high), *batch)(new)[1]

    for high, share in ((0.2, 0.25), (1.9, 0.25), (2.1, 0.0)):
        found = held(high)
        assert float(found["top"]) == share
        expected = share * higher.PROMPTS * higher.GROUP_SIZE * 0.1
        assert float(found["top_probability"]) == pytest.approx(expected, rel=1e-5)


def test_a_clip_that_is_never_reached_is_no_clip():
    new, *batch = moved_bandit()

    def gradient(algorithm):
        loss = higher.make_loss(algorithm, *batch)
        return jax.grad(lambda params: loss(params)[0])(new)["logits"]

    symmetric = load_algorithm("grpo", "kl=none")
    never = higher.clipped_at(symmetric, higher.OFF, higher.OFF)
    none = load_algorithm("grpo", "kl=none", "clip=importance")
    off, without, clipped = jax.jit(lambda: tuple(map(gradient, (never, none, symmetric))))()
    np.testing.assert_allclose(off, without, rtol=1e-6)
    assert np.abs(off - clipped).max() > 1e-3


def moved_bandit():
    """A policy, and a rollout of another: token 1 has gone from 0.1 to 0.3, token 0 down to 0.4."""
    old = {"logits": jnp.log(jnp.array([[0.6, 0.1, 0.3]] * higher.PROMPTS))}
    new = {"logits": jnp.log(jnp.array([[0.4, 0.3, 0.3]] * higher.PROMPTS))}
    rows = jnp.repeat(jnp.arange(higher.PROMPTS), higher.GROUP_SIZE)
    tokens = jnp.tile(jnp.array([0, 0, 1, 2]), len(rows) // 4)[:, None]
    logp = higher.tabular.logps(old, rows, tokens)
    mask = jnp.ones(tokens.shape, bool)
    rollout = Rollout(rows[:, None], mask, tokens, mask, logp, ~mask[:, 0], rows)
    return new, rollout, (tokens[:, 0] > 0).astype(jnp.float32), rows


def test_the_first_design_has_a_token_that_no_ceiling_binds():
    design = higher.DESIGNS[higher.CLAIM]
    start = tabular_bandit.peaked(higher.PROMPTS, len(design.value), design.share)
    # 0.9 * 0.5, and 0.1 over five tokens of 0.8 and ten of 0.2
    earned = float(tabular_bandit.expected_reward(start, design.value))
    assert earned == pytest.approx(0.45 + 0.1 * (5 * 0.8 + 10 * 0.2) / 15, rel=1e-5)
    assert design.share * 1.2 > 1


@cache
def compiled(family):
    """(parameters that have moved by `rate`, constants of the clip) -> gradient, share clipped."""
    params, target = tabular_chain.init(jax.random.key(0), slots=gspo.SLOTS, **gspo.START)
    group = jnp.repeat(jnp.arange(len(gspo.THRESHOLDS)), gspo.GROUP_SIZE)
    rollout = jax.jit(tabular_chain.sample)(params, group, jax.random.key(1), 0)
    direction = jax.random.normal(jax.random.key(2), params["logits"].shape)
    algorithm = load_algorithm(*gspo.FAMILIES[family])

    def gradient(rate, low, high):
        rule = gspo.with_clip(algorithm, low, high)
        loss = gspo.make_loss(rule, target, group, rollout.completion, rollout.sampler_logp)
        moved = {"logits": params["logits"] + rate * direction}
        grad, sums = jax.grad(loss, has_aux=True)(moved)
        return grad["logits"], (sums["clip_low"] + sums["clip_high"]) / sums["tokens"]

    return jax.jit(gradient)


def gradient(name, rate):
    """Of the production loss under the rule called `name` in the experiment."""
    family, low, high = gspo.RULES[name]
    grad, clipped = compiled(family)(rate, low, high)
    return np.asarray(grad), float(clipped)


def test_on_policy_all_rules_have_one_gradient():
    expected, _ = gradient(gspo.GRPO, 0.0)
    assert np.abs(expected).max() > 1e-3
    for name in gspo.RULES:
        found, clipped = gradient(name, 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-8, err_msg=name)
        assert clipped == 0


def test_off_policy_gspo_clips_what_grpo_does_not():
    expected, grpo = gradient(gspo.GRPO, 0.02)
    paper, narrow = gradient(gspo.PAPER, 0.02)
    wide, none = gradient(gspo.WIDE, 0.02)
    assert grpo == none == 0 and narrow > 0.1
    assert np.abs(paper - expected).max() > 1e-3
    assert 0 < np.abs(wide - expected).max() < 1e-3


def test_minibatches_of_one_rollout_are_cut_and_counted(monkeypatch):
    monkeypatch.setattr(gspo, "UPDATES", 4)
    monkeypatch.setattr(gspo, "RATES", (0.02, 0.1))
    found = gspo.simulate("gspo", 2, seeds=2)
    assert [name for name, _ in found] == [name for name in gspo.RULES if name.startswith("GSPO")]
    for metrics in found.values():
        assert all(values.shape == (2, 2, 2) for values in metrics.values())
    shares = found[gspo.PAPER, 2]["clipped"]
    # the first of the two minibatches is on-policy, and a group that is tied has no advantage
    assert (0 < shares).all() and (shares <= 0.5).all()


def test_the_deviation_of_the_sequence_ratio_falls_with_the_root_of_the_length(monkeypatch):
    monkeypatch.setattr(gspo, "ANSWERS", 256)
    short, long = (gspo.drift(slots, seeds=4) for slots in (8, 128))
    assert short["sd"].mean() / long["sd"].mean() == pytest.approx(4, rel=0.15)
    assert long["mean_log"].mean() == pytest.approx(short["mean_log"].mean(), rel=0.5)
    assert long[gspo.WIDE].mean() < short[gspo.WIDE].mean() < short[gspo.PAPER].mean()
