"""knobs.py: an algorithm's numbers as arguments of a program do what they do as its constants."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_jax.config import CONF, load_algorithm
from grpo_jax.kernels import aggregation, clip, kl
from grpo_jax.knobs import COMPILED, knobs, with_knobs
from grpo_jax.loss import policy_loss
from grpo_jax.types import Entropy, Kl
from tests.cases import make_algorithm, make_batch, one_axis_at_a_time
from tests.composed import row

PRESETS = {path.stem: load_algorithm(path.stem) for path in sorted(CONF.glob("algorithm/*.yaml"))}
ALL = PRESETS | one_axis_at_a_time()
LOSSES = {tuple(row(a)[axis] for axis in COMPILED): name for name, a in ALL.items()}  # each once
TOKENS = ("logp", "entropy", "exact_kl")  # what has a gradient


def losses(algorithms, batch):
    """name -> ((loss, sums), gradient) of each, all in one program."""

    def of(algorithm):
        def loss(tokens):
            given = {n: x for n, x in batch.items() if n not in (*TOKENS, "group")}
            weight = algorithm.aggregation(batch["mask"], batch["group"])
            return policy_loss(algorithm, **tokens, **given, weight=weight)

        tokens = {name: batch[name] for name in TOKENS}
        return jax.value_and_grad(loss, has_aux=True)(tokens)

    return {name: of(algorithm) for name, algorithm in algorithms.items()}


def test_loss_and_gradient_are_those_of_constants():
    algorithms = {name: ALL[name] for name in LOSSES.values()}
    constant = jax.jit(partial(losses, algorithms))(make_batch())

    @jax.jit
    def traced(batch, values):
        return losses({n: with_knobs(a, values[n]) for n, a in algorithms.items()}, batch)

    free = traced(make_batch(), {name: knobs(a) for name, a in algorithms.items()})
    for name in algorithms:
        (loss, _), gradient = constant[name]
        assert np.isfinite(loss) and np.abs(gradient["logp"]).max() > 0, name
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=5e-7, atol=1e-7, err_msg=name),
            free[name],
            constant[name],
        )


@pytest.mark.parametrize("name", ALL)
def test_other_numbers_are_the_algorithm_that_has_them(name):
    algorithm, values = ALL[name], knobs(ALL[name])
    assert row(with_knobs(algorithm, values)) == row(algorithm)
    other = {key: value + 1 for key, value in values.items()}
    changed = with_knobs(algorithm, other)
    assert knobs(changed) == pytest.approx(other)
    differ = {axis for axis, text in row(changed).items() if text != row(algorithm)[axis]}
    assert differ == {key.split(".")[0] for key in values}


def test_every_number_has_its_name():
    assert knobs(PRESETS["dapo"]) == {"clip.low": 0.2, "clip.high": 0.28}
    assert knobs(PRESETS["grpo"])["kl.coef"] == 0.04
    assert set(knobs(PRESETS["deepseek_v32"])) >= {"correction.threshold", "kl.coef"}
    inner = ALL["correction=by_row_in_off_policy_sequence"]
    assert {k: v for k, v in knobs(inner).items() if k.startswith("correction")} == {
        "correction.threshold": 0.05,
        "correction.rule.rule.cap": 1.1,
    }
    assert knobs(ALL["aggregation=constant"])["aggregation.length"] == 16


def mine(log_ratio, advantage, logp, mask, *, low: float, high, size: int):
    return clip.none(log_ratio, advantage, logp, mask)


def untyped(log_ratio, advantage, logp, mask, *, low: "Nowhere"):
    return clip.none(log_ratio, advantage, logp, mask)


@pytest.mark.parametrize(
    "axes",
    [
        {"kl": Kl(kl.k3, 0.0, "loss")},  # no reference policy is there
        {"entropy": Entropy(0.0, None)},
        {"clip": partial(mine, low=0.2, high=0.2, size=3)},  # may need them to be numbers
        {"clip": partial(untyped, low=0.2)},
        {"aggregation": partial(aggregation.local, rows=4, rule=aggregation.token_mean)},
    ],
)
def test_structure_stays(axes):
    plain = replace(make_algorithm(clip=clip.none), **axes)
    assert knobs(plain) == {}


def test_a_coefficient_that_will_move_may_begin_at_zero():
    adaptive = Entropy(0.0, lambda coef, entropy: (coef, coef))
    assert knobs(make_algorithm(entropy=adaptive))["entropy.coef"] == 0
