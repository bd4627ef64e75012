"""What experiments/length_drift, dynamic_sampling and kl_estimators rest on, and stored."""

import csv
import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import rollout
from grpo_jax.config import load_algorithm
from grpo_jax.models import tabular_length

pytestmark = pytest.mark.core

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_run", EXPERIMENTS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a NamedTuple looks for its annotations
    spec.loader.exec_module(module)
    return module


drift, sampling, kl = map(load, ("length_drift", "dynamic_sampling", "kl_estimators"))


def stored(name):
    with (EXPERIMENTS / name / "results.csv").open() as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------- length_drift


@pytest.fixture(scope="module")
def pull():
    """Mean gradient of the wrong answers' stop logit over rollouts: rule -> (mean, 2.6 s.e.)."""
    params = tabular_length.init(right=drift.RIGHT, mean_length=drift.MEAN_LENGTH)

    def measure(rule):
        algorithm = load_algorithm(*drift.RULES[rule])
        one = partial(drift.gradient, algorithm, params, jax.random.key(7))
        stop = np.asarray(jax.jit(jax.vmap(one))(jnp.arange(200))["stop"][:, 0, 0], np.float64)
        return stop.mean(), 2.6 * stop.std() / len(stop) ** 0.5

    names = ("sequence_mean", "prompt_mean + std (DAPO, eq. 8)", "constant (Dr. GRPO)")
    return {name: measure(name) for name in names}


def test_the_mean_over_an_answer_pushes_wrong_answers_to_go_on(pull):
    # E[1/n sum_t d log pi / d stop] for geometric lengths, a stop, n-1 tokens that go on, and one
    # first token beside them: (1 - L h) / (L + 1). The advantage of a wrong answer is -p (1 - 1/G)
    # on average, and a share 1 - p of the answers is wrong
    h, n = 1 / drift.MEAN_LENGTH, np.arange(1, drift.LONGEST + 1)
    chance = h * (1 - h) ** (n - 1)
    uncut = chance @ ((1 - n * h) / (n + 1))
    cut = (1 - h) ** drift.LONGEST * -drift.LONGEST * h / (drift.LONGEST + 1)
    weight = (1 - drift.RIGHT) * drift.RIGHT * (1 - 1 / drift.GROUP_SIZE)
    expected = weight * (uncut + cut)  # the gradient of a loss that descent lowers: stop less
    mean, error = pull["sequence_mean"]
    assert expected > 0
    assert abs(mean - expected) < error
    assert error < expected / 4


def test_a_mean_over_the_group_pushes_less_and_a_constant_not_at_all(pull):
    mean, error = pull["prompt_mean + std (DAPO, eq. 8)"]
    assert error < mean < pull["sequence_mean"][0] / 2
    mean, error = pull["constant (Dr. GRPO)"]
    assert abs(mean) < error < pull["sequence_mean"][0] / 5


def test_the_frozen_branch_stays_and_the_learnable_one_learns():
    key, settings = jax.random.key(0), dict(optimizer=drift.SGD, steps=30, columns=1)

    @partial(jax.jit, static_argnames="learnable")
    def curve(learnable):
        algorithm = load_algorithm(*drift.RULES["sequence_mean"])
        return drift.train(algorithm, key, learnable=learnable, **settings)["p_right"]

    assert np.ptp(curve(False)) == 0
    assert curve(True)[-1] > curve(True)[0] + 0.1


def test_the_stored_lengths_keep_the_rule():
    columns = ("wrong", "wrong_low", "wrong_high")
    summaries = {}
    for row in stored("length_drift"):
        series = summaries.setdefault((row["setting"], row["rule"]), {c: [] for c in columns})
        for column in columns:
            series[column].append(float(row[column]))
    assert drift.misses(summaries) == []
    broken = {k: {c: np.full(2, 10.0) for c in columns} for k in summaries}
    assert len(drift.misses(broken)) == 9  # three rules that should drift, three settings


# --------------------------------------------------------------------------- dynamic_sampling


class Numbered(tuple):
    """Stands for `Answers`: group ids that can be picked from."""

    def take(self, index):
        return Numbered(self[i] for i in index)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("waiting", [0, 2])
def test_the_choice_of_groups_is_that_of_the_trainers_rollout(monkeypatch, share, waiting):
    monkeypatch.setattr(
        rollout.Answers, "concatenate", staticmethod(lambda many: Numbered(sum(many, ())))
    )
    count, rounds = 4, 5
    rng = np.random.default_rng(int(100 * share) + waiting)
    for _ in range(20):
        keep = rng.random((1 + rounds, count)) < share
        keep[0] = np.arange(count) < waiting
        used = [(Numbered(np.arange(count)[:waiting]), np.ones(waiting, bool))]
        kept = waiting
        while len(used) - 1 < rounds and kept < count:  # as `Collector.collect`
            number = len(used)
            used.append((Numbered(number * count + np.arange(count)), keep[number]))
            kept += keep[number].sum()
        chosen, mask, rest = rollout._choose(used, count)
        places, found, drawn, needed = jax.jit(sampling.choose, static_argnums=1)(
            keep.reshape(-1), count
        )
        assert drawn == len(used) - 1
        np.testing.assert_array_equal(found[places[:count]], mask)
        assert tuple(np.asarray(places[:count])[mask]) == tuple(np.array(chosen)[mask])
        left = np.asarray(places[count : 2 * count])
        assert tuple(left[found[left]]) == (() if rest is None else rest)
        if kept >= count:  # the last place that was needed is the batch's last group
            assert needed == places[count - 1] + 1 - count
        else:
            assert needed == rounds * count


@pytest.fixture(scope="module")
def arms():
    preset, _ = sampling.SCALES["group_std"]
    keys = jax.vmap(jax.random.key)(jnp.arange(2))

    def simulate(name):
        algorithm = load_algorithm(*preset, *sampling.FILTERS[name])
        training = partial(sampling.train, algorithm, updates=8)
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(training))(keys))

    return {name: simulate(name) for name in sampling.FILTERS}


def test_what_a_step_draws_is_counted(arms):
    per_round = sampling.BATCH * sampling.GROUP_SIZE
    np.testing.assert_array_equal(arms["none"]["rollouts"], [(np.arange(8) + 1) * per_round] * 2)
    np.testing.assert_array_equal(arms["none"]["counted"], arms["none"]["rollouts"])
    for name in ("mixed", "mixed, surplus kept"):
        assert (arms[name]["filled"] == 1).all()
        assert (arms[name]["counted"] <= arms[name]["rollouts"]).all()
        assert (arms[name]["rollouts"] % per_round == 0).all()
    kept = arms["mixed, surplus kept"]["rollouts"][:, -1]
    assert (arms["none"]["rollouts"][:, -1] < kept).all()
    assert (kept <= arms["mixed"]["rollouts"][:, -1]).all()


def test_the_filter_spares_updates(arms):
    gain = {name: curves["p_right"][:, -1] for name, curves in arms.items()}
    assert (gain["mixed"] > gain["none"]).all()
    assert (gain["mixed, surplus kept"] > gain["none"]).all()


def test_the_rule_judges_costs():
    def curves(updates, rollouts):
        reached = np.arange(1, 601) >= updates
        total = np.linspace(0, rollouts, 600 + 1)[1:] * 600 / updates
        return {"p_right": reached * np.ones((3, 1)), "rollouts": total * np.ones((3, 1))}

    def arm(updates, rollouts, counted):
        c = curves(updates, rollouts)
        return c | {"counted": curves(updates, counted)["rollouts"]}

    none = arm(300, 3000, 3000)
    assert sampling.misses({"none": none, "mixed": arm(120, 3300, 3000)}) == []
    assert len(sampling.misses({"none": none, "mixed": arm(200, 3300, 3000)})) == 3
    assert len(sampling.misses({"none": none, "mixed": arm(120, 2000, 2000)})) == 6
    assert np.isnan(sampling.cost({"p_right": np.zeros((2, 5))}, 0.75, "updates")).all()


# ------------------------------------------------------------------------------ kl_estimators


@pytest.fixture(scope="module")
def pairs():
    with jax.enable_x64(True):
        return kl.simulate(1.0, draws=20), kl.simulate(1.0, kl.MOVED, draws=20)


def test_the_penalties_gradients_are_exact_where_they_should_be(pairs):
    on_policy, moved = pairs
    assert kl.misses({1.0: on_policy}, {1.0: moved}) == []
    for name in kl.EXACT:
        assert on_policy[f"{name}, reverse"].max() < 1e-12
    assert on_policy[f"{kl.FORWARD}, forward"].max() < 1e-12
    np.testing.assert_allclose(on_policy["k1 in the loss, reverse"], 1, rtol=1e-12)  # no gradient


def test_and_far_off_where_they_are_not(pairs):
    on_policy, moved = pairs
    assert on_policy[f"{kl.FORWARD}, reverse"].min() > 0.05
    for name in set(kl.PENALTIES) - {kl.ALWAYS}:
        assert moved[f"{name}, reverse"].min() > 0.05, name
    assert len(kl.misses({1.0: moved}, {1.0: moved})) == len(kl.EXACT)  # one is exact, k3's not


def test_k1_and_k3_have_the_right_mean_and_k2_has_not(pairs):
    on_policy, _ = pairs
    for name in ("k1", "k3"):
        np.testing.assert_allclose(on_policy[f"{name}, bias"], 0, atol=1e-12)
    assert np.abs(on_policy["k2, bias"]).max() > 0.05


def test_the_stored_gaussians_are_near_the_printed_table():
    rows = {(r["drift"], r["quantity"]): float(r["mean"]) for r in stored("kl_estimators")[:12]}
    for (mean, name), (bias, deviation) in kl.PRINTED.items():
        assert rows[str(mean), f"{name}, bias"] == pytest.approx(bias, abs=0.01)
        assert rows[str(mean), f"{name}, deviation"] == pytest.approx(deviation, rel=0.01)
