"""The article's toy loop (section 2.6), as experiments/seed_loop runs it."""

import csv
import dataclasses
import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.kernels import clip, filter, kl, shaping
from grpo_jax.kernels.sampling import row_uniform
from grpo_jax.models import tabular
from grpo_jax.tabular_loop import train
from grpo_jax.types import Filter, Kl
from tests.cases import make_algorithm

pytestmark = pytest.mark.core

FOLDER = Path(__file__).parents[1] / "experiments" / "seed_loop"
_spec = importlib.util.spec_from_file_location("seed_loop_run", FOLDER / "run.py")
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)

SMALL = {"prompts": 3, "vocab": 4, "group_size": 8, "steps": 6, "inner": 3}


def article_loop(uniform, *, prompts, vocab, group_size, steps, inner, lr, low, high, ddof=1):
    """The listing in float64 numpy, with its gradient by hand; uniform [steps, N*G] draws."""
    logits, right = np.zeros((prompts, vocab)), []
    rows = np.repeat(np.arange(prompts), group_size)
    for step in range(steps):
        old = log_softmax(logits)
        reached = np.cumsum(np.exp(old), axis=1)[rows]
        token = np.sum(reached <= uniform[step][:, None], axis=1)
        reward = (token == rows).astype(float).reshape(prompts, group_size)
        centred = reward - reward.mean(1, keepdims=True)
        advantage = (centred / (reward.std(1, keepdims=True, ddof=ddof) + 1e-8)).reshape(-1)
        for _ in range(inner):
            logp = log_softmax(logits)
            ratio = np.exp(logp[rows, token] - old[rows, token])
            kept = ratio * advantage <= np.clip(ratio, 1 - low, 1 + high) * advantage
            d_logp = kept * ratio * advantage / len(rows)
            d_logits = np.zeros_like(logits)
            np.add.at(d_logits, (rows, token), d_logp)
            np.add.at(d_logits, rows, -d_logp[:, None] * np.exp(logp)[rows])
            logits = logits + lr * d_logits
        right.append(np.exp(np.diagonal(log_softmax(logits))).mean())
    return np.array(right)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def draws(key, *, prompts, group_size, steps, **_):
    rows = jnp.arange(prompts * group_size)
    draw = jax.jit(jax.vmap(partial(row_uniform, key, rows)))
    return np.asarray(draw(jnp.arange(steps)), np.float64)


def curve(algorithm, key, **setting):
    return jax.jit(partial(train, algorithm, **setting))(key)


@pytest.fixture(scope="module")
def thousand():
    return run.simulate(run.article_algorithm(ddof=1), run.seed_keys())


def test_the_six_numbers_over_a_thousand_seeds(thousand):
    assert thousand["p_correct"].shape == (1000, 80)
    mean = thousand["p_correct"].astype(np.float64).mean(0)
    for step, expected in {0: 0.209, 16: 0.421, 32: 0.685, 48: 0.843, 64: 0.912, 79: 0.941}.items():
        assert mean[step] == pytest.approx(expected, abs=0.003), step
    assert run.misses(mean) == []
    assert len(run.misses(mean + 0.007)) == 6


def test_the_articles_own_seed_is_an_ordinary_one(thousand):
    for step, printed in run.ARTICLE.items():
        low, high = np.quantile(thousand["p_correct"][:, step], [0.025, 0.975])
        assert low <= printed + 0.0005 and printed - 0.0005 <= high, step


def test_the_stored_results_are_those_of_this_code(thousand):
    with (FOLDER / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["ddof"] == "1"]
    assert [int(row["step"]) for row in rows] == list(range(80))
    for metric in ("p_correct", "reward", "useful"):
        stored = [float(row[metric]) for row in rows]
        np.testing.assert_allclose(thousand[metric].mean(0), stored, atol=5e-4)
    table = (FOLDER / "README.md").read_text()
    for step in run.EXPECTED:
        assert f"| {float(rows[step]['p_correct']):.4f} [" in table


def test_the_articles_clip_can_hold_nothing_back(thousand):
    assert not thousand["clip_ratio/low_mean"].any()
    assert not thousand["clip_ratio/high_mean"].any()


def test_all_seeds_are_one_compiled_program(compiles):
    keys = run.seed_keys(4)
    reverse = keys[::-1]
    short = jax.jit(jax.vmap(partial(train, make_algorithm(), lr=0.3, **SMALL)))
    compiles.clear()
    first, second = short(keys), short(reverse)
    assert len(compiles) == 1
    np.testing.assert_array_equal(first["reward"], second["reward"][::-1])


@pytest.mark.parametrize("seed", [0, 1, 999])
def test_a_whole_training_equals_the_listing_in_float64(thousand, seed):
    uniform = draws(jax.random.key(seed), **run.SETTING)
    expected = article_loop(uniform, **run.SETTING, low=0.2, high=0.2)
    np.testing.assert_allclose(thousand["p_correct"][seed], expected, rtol=1e-5)


def test_a_clip_that_acts_equals_the_listing_and_matters():
    """Many updates at a high rate, so that ratios leave a narrow, lopsided range on both sides."""
    key, setting = jax.random.key(3), SMALL | {"inner": 6, "lr": 2.0}

    @jax.jit
    @jax.vmap
    def curves(low, high):
        return train(make_algorithm(clip=partial(clip.bounded, low=low, high=high)), key, **setting)

    ours = curves(*jnp.array([[0.1, 0.3, 1.0], [0.3, 0.1, 1e6]]))
    uniform = draws(key, **setting)
    expected = article_loop(uniform, **setting, low=0.1, high=0.3, ddof=0)
    right, swapped, unclipped = ours["p_correct"]
    np.testing.assert_allclose(right, expected, rtol=1e-5)
    assert ours["clip_ratio/low_mean"][0].max() > 0.1
    assert ours["clip_ratio/high_mean"][0].max() > 0.1
    assert np.abs(swapped - expected).max() > 0.01
    assert np.abs(unclipped - expected).max() > 0.01


def test_constants_and_seeds_of_a_sweep_are_one_program(compiles):
    keys, highs = run.seed_keys(2), jnp.array([0.05, 0.2])
    rates = jnp.array([0.5, 2.0])

    def cell(key, high, lr):
        algorithm = make_algorithm(clip=partial(clip.bounded, low=0.2, high=high))
        return train(algorithm, key, lr=lr, **SMALL)["p_correct"]

    grid = jax.vmap(jax.vmap(cell, (0, None, None)), (None, 0, 0))
    compiles.clear()
    swept = jax.jit(grid)(keys, highs, rates)
    assert len(compiles) == 1
    assert swept.shape == (2, 2, 6)
    alone = jax.jit(cell)(keys[0], 0.2, 2.0)
    np.testing.assert_allclose(swept[1, 0], alone, rtol=1e-6)


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo"])
def test_other_presets_learn(preset):
    one_round = ["filter.max_rounds=1"] if preset == "dapo" else []
    setting = SMALL | {"steps": 40, "lr": 1.0}
    result = curve(load_algorithm(preset, *one_round), jax.random.key(0), **setting)
    assert result["p_correct"][-1] > result["p_correct"][0] + 0.1


def sweep(change, *constants):
    """P(correct) [sweep, steps] of `make_algorithm(**change(constants))`, one compiled program."""

    def cell(*values):
        algorithm = make_algorithm(**change(*values))
        return train(algorithm, jax.random.key(0), lr=1.0, **SMALL)["p_correct"]

    return jax.jit(jax.vmap(cell))(*map(jnp.array, constants))


def test_the_filter_acts():
    def change(low, high):
        rule = partial(filter.pass_range, low=low, high=high)
        return {"filter": Filter(rule, "correct", 1, "partial")}

    every, narrow, none = sweep(change, [-1.0, 0.2, 2.0], [2.0, 0.3, 3.0])
    assert np.abs(every - narrow).max() > 1e-3
    np.testing.assert_array_equal(none, np.float32(0.25))  # no group left: the policy stays


def test_the_shaping_acts():
    def change(penalty):
        # no baseline: it would subtract what all answers share
        rule = partial(shaping.overlong, limit=1, buffer_share=0.5, penalty=penalty)
        return {"baseline": lambda reward, length: jnp.zeros_like(reward), "shaping": rule}

    without, shaped = sweep(change, [0.0, 0.5])
    assert np.abs(without - shaped).max() > 1e-3


def test_the_kl_acts_in_the_loss_and_in_the_reward():
    def right(coef, where):
        algorithm = make_algorithm(kl=Kl(kl.k3, coef, where))
        return curve(algorithm, jax.random.key(0), lr=1.0, **SMALL)["p_correct"]

    free, loss, reward = right(0.0, "loss"), right(1.0, "loss"), right(1.0, "reward")
    assert loss[-1] < free[-1] - 0.01  # the leash holds it near the uniform policy
    assert np.abs(reward - free).max() > 1e-3
    assert np.abs(reward - loss).max() > 1e-3


def test_useful_groups_are_those_whose_rewards_differ():
    key, setting = jax.random.key(5), SMALL | {"group_size": 2, "lr": 0.0}
    token = np.floor(draws(key, **setting) * 4).reshape(6, 3, 2)
    reward = token == np.arange(3)[:, None]
    result = curve(make_algorithm(), key, **setting)
    np.testing.assert_allclose(result["reward"], reward.mean((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(
        result["useful"], (reward[..., 0] != reward[..., 1]).mean(1), rtol=1e-6
    )


def test_the_sampler_reports_the_policys_own_log_probs():
    params = {"logits": jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]))}
    prompts = jnp.array([0, 1, 0, 1])
    rollout = jax.jit(tabular.sample)(params, prompts, jax.random.key(0), 0)
    logp = tabular.logps(params, prompts, rollout.completion)
    np.testing.assert_allclose(rollout.sampler_logp, logp, rtol=1e-6)
    np.testing.assert_allclose(
        tabular.logps(params, prompts, jnp.array([[0], [2], [1], [0]])),
        np.log([[0.5], [0.75], [0.25], [0.125]]),
        rtol=1e-6,
    )


def test_what_a_table_cannot_do_is_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="vocab=2"):
        train(make_algorithm(), key, lr=0.1, **SMALL | {"vocab": 2})
    base = make_algorithm().filter
    for change in ({"max_rounds": 2}, {"on_exhausted": "skip"}, {"on": "format"}):
        algorithm = make_algorithm(filter=dataclasses.replace(base, **change))
        with pytest.raises(ValueError, match="max_rounds"):
            train(algorithm, key, lr=0.1, **SMALL)
