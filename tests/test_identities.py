"""What holds between algorithms whatever the numbers: relations that no transcription could share.

Between the presets (conf/algorithm), in float64: which of them have one gradient on policy, which
are multiples of each other, what sums to nothing, and what order, padding and empty rows don't
change. The axes alone have theirs in tests/kernels.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import CONF, load_algorithm
from grpo_jax.kernels import aggregation, baseline, clip, kl, ratio, scale, select
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.types import Entropy, Kl
from tests.cases import make_batch

BUDGET = 16  # tokens
PRESETS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
NO_CANDIDATES = ("clip.covariance_low=1000", "clip.covariance_high=2000")
close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-15)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@cache
def preset(name, *overrides):
    return load_algorithm(name, f"rollout.max_completion_length={BUDGET}", *overrides)


def make_case():
    """Arrays of 12 rows in 3 groups, with ratios on both sides of a clip; see tests/cases.py."""
    batch = {name: x for name, x in make_batch().items() if name != "key"}
    entropy = np.random.default_rng(8).uniform(0, 2, batch["mask"].shape)
    return batch | {"entropy": jnp.asarray(entropy)}


def on_policy():
    batch = make_case()
    return batch | {"old_logp": batch["logp"], "sampler_logp": batch["logp"]}


def run(algorithm, batch):
    """(loss, d loss / d logp)."""
    batch = dict(batch)
    group, logp = batch.pop("group"), batch.pop("logp")
    weight = algorithm.aggregation(batch["mask"], group)

    def loss(logp):
        key = jax.random.key(0)
        return policy_loss(algorithm, logp, weight=weight, key=key, **batch)[0]

    value, gradient = jax.value_and_grad(loss)(logp)
    assert abs(gradient).max() > 1e-4
    return float(value), np.asarray(gradient)


def bare(algorithm, **axes):
    """The policy term alone, of every token."""
    none = {"kl": Kl(kl.none, 0.0, "loss"), "entropy": Entropy(0.0, None), "select": select.none}
    return replace(algorithm, **none | axes)


# ------------------------------------------------------------------------------- on policy


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_the_gradient_is_that_of_a_log_p_under_the_presets_aggregation(name):
    """So the trust regions differ after the first step only. By a sum of the log ratios (RLOO) each
    token moves its whole row: the mean over n tokens of n times its term."""
    algorithm = bare(preset(name, *(NO_CANDIDATES if name == "clip_cov" else ())))
    weigh = aggregation.sequence_sum if name == "rloo" else algorithm.aggregation
    plain = replace(algorithm, ratio=ratio.token, clip=clip.none, aggregation=weigh)
    batch = on_policy()
    expected = run(plain, batch)[1]
    close(expected, -weigh(batch["mask"], batch["group"]) * batch["advantage"][:, None])
    got = run(algorithm, batch)[1]
    if algorithm.ratio.func is ratio.token and algorithm.clip.func not in (clip.sapo, clip.gmpo):
        np.testing.assert_array_equal(got, expected)  # to the last digit
    close(got, expected)


def test_off_policy_no_two_of_these_are_the_same():
    """The case above is not an accident of the batch."""
    names = ("trl_default", "dapo", "cispo", "vespo", "dppo", "kl_cov")
    gradients = [run(bare(preset(n)), make_case())[1] for n in names]
    for i, one in enumerate(gradients):
        assert all(abs(one - other).max() > 1e-3 for other in gradients[:i])


def test_cispo_within_its_cap_is_the_clip_within_its_range():
    """Also off policy, where A log p without a ratio (GPG) is another gradient."""
    cispo, clipped, gpg = (bare(preset(n)) for n in ("cispo", "dapo", "gpg"))
    batch = make_case()
    shift = jnp.clip(batch["logp"] - batch["old_logp"], -0.15, 0.15)
    near = batch | {"old_logp": batch["logp"] - shift}
    close(run(cispo, near)[1], run(clipped, near)[1])
    assert abs(run(gpg, near)[1] - run(clipped, near)[1]).max() > 1e-3
    assert abs(run(cispo, batch)[1] - run(clipped, batch)[1]).max() > 1e-3


# ----------------------------------------------------------------------------- whole answers


@pytest.mark.parametrize("name", ["sequence_mean", "token_mean", "prompt_mean", "sequence_sum"])
def test_gspo_is_gspo_token_while_advantages_are_by_answer(name):
    """Under every aggregation: what matters is that a row's tokens weigh the same. Aggregations
    make different algorithms of both."""
    # a range that clips some answers and not others
    wide = ("clip.low=0.03", "clip.high=0.04", f"aggregation={name}")
    whole, by_token = preset("gspo", *wide), preset("gspo", *wide, "ratio=sequence_token")
    batch = make_case()
    value, gradient = run(whole, batch)
    other_value, other_gradient = run(by_token, batch)
    close(other_value, value)
    close(other_gradient, gradient)
    rows = batch["mask"].any(1)
    still = (gradient == 0).all(1)[rows]
    assert still.any() and not still.all()
    if name != "sequence_mean":
        mean = run(preset("gspo", *wide[:2]), batch)[1]
        moving = abs(mean) > 0
        shares = gradient[moving] / mean[moving]
        assert np.ptp(shares) > 0.1 * shares.max()  # no multiple of each other


def test_gspo_token_parts_from_gspo_with_advantages_by_token():
    batch = make_case()
    noise = np.random.default_rng(2).normal(0, 1, batch["mask"].shape)
    batch |= {"advantage": batch["advantage"][:, None] + noise}
    wide = ("clip.low=0.3", "clip.high=0.4")
    value, gradient = run(preset("gspo", *wide), batch)
    other_value, other_gradient = run(preset("gspo", *wide, "ratio=sequence_token"), batch)
    close(other_value, value)
    assert abs(other_gradient - gradient).max() > 1e-2
    close(other_gradient.sum(1), gradient.sum(1))  # shared out otherwise among a row's tokens


def test_luspo_is_gspo_times_the_length_of_the_answer():
    batch = make_case()
    luspo, gspo = run(preset("luspo"), batch)[1], run(preset("gspo", "clip=luspo"), batch)[1]
    close(luspo, batch["mask"].sum(1, keepdims=True) * gspo)


def test_dr_grpo_is_the_token_mean_times_tokens_over_rows_and_budget():
    batch = make_case()
    constant = run(preset("dr_grpo"), batch)
    token_mean = run(preset("dr_grpo", "aggregation=token_mean"), batch)
    factor = float(batch["mask"].sum()) / (len(batch["mask"]) * BUDGET)
    close(constant[0], token_mean[0] * factor)
    close(constant[1], token_mean[1] * factor)


# -------------------------------------------------------------------------------- advantages

BY_SPREAD = ("group_std", "group_std_trl", "group_std_verl", "batch_std")
FACTORS = (*BY_SPREAD, "group_mean", "informative_share", "nonzero_share")


def rewards():
    """(reward, length) of 6 prompts with 5 answers: a tied group, one unscored, one half so."""
    rng = np.random.default_rng(6)
    reward = rng.choice([0.0, 0.3, 1.0], (6, 5))
    reward[1], reward[2], reward[3, :2] = 0.7, np.nan, np.nan
    return jnp.asarray(reward), jnp.asarray(rng.integers(1, 9, (6, 5)))


def scaled(name, center=baseline.group_mean):
    return np.asarray(advantage(center, preset("grpo", f"scale={name}").scale, *rewards()))


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1():
    """G: those of the group that could be scored."""
    count = np.sum(~np.isnan(rewards()[0]), 1, keepdims=True)
    assert set(count.ravel().tolist()) == {0, 3, 5}
    factor = count / np.maximum(count - 1, 1)
    rloo = preset("rloo")
    got = advantage(rloo.baseline, rloo.scale, *rewards())
    close(got, factor * scaled("none"))


@pytest.mark.parametrize("name", FACTORS)
def test_a_scale_is_one_positive_factor_a_group_so_that_no_sign_flips(name):
    plain, divided = scaled("none"), scaled(name)
    np.testing.assert_array_equal(np.sign(divided), np.sign(plain))
    for before, after in zip(plain, divided, strict=True):
        factors = after[before != 0] / before[before != 0]
        assert (factors > 0).all()
        close(factors, np.full_like(factors, factors.mean() if factors.size else 1))


@pytest.mark.parametrize("name", ["none", *FACTORS, "whiten"])
def test_advantages_of_a_group_sum_to_nothing(name):
    for center in (baseline.group_mean, baseline.leave_one_out):
        value = scaled(name, center)
        assert (abs(value).max(1) > 0.1).sum() == 4
        np.testing.assert_allclose(value.sum(1), np.zeros(6), atol=1e-12)


def test_advantages_of_opo_times_lengths_sum_to_nothing():
    opo, (_, length) = preset("opo"), rewards()
    value = np.asarray(advantage(opo.baseline, opo.scale, *rewards()))
    np.testing.assert_allclose((length * value).sum(1), np.zeros(6), atol=1e-12)
    assert abs(value.sum(1)).max() > 0.1


def test_advantages_whitened_by_token_times_lengths_sum_to_nothing_over_the_batch():
    whole = partial(scale.whiten_tokens, ddof=1, eps=1e-8, hold_tied=False)
    reward, length = rewards()
    value = advantage(baseline.none, whole, reward, length)
    np.testing.assert_allclose((length * value).sum(), 0, atol=1e-12)
    assert abs(value.sum()) > 0.1


# ---------------------------------------------------------------- order, padding, empty rows

ACTING = {  # constants with which these rules act on a small batch, and draw all there is to draw
    "clip_cov": ("clip.share=1.0", "clip.covariance_low=0.3"),
    "kl_cov": ("clip.share=0.2",),
}


def acting(name):
    return preset(name, *ACTING.get(name, ()))


def added(batch, count, group):
    """With `count` wholly masked rows at the end, which hold rubbish."""
    fill = {"mask": False, "group": group, "entropy": jnp.nan}
    return {
        key: jnp.concatenate([x, jnp.full((count, *x.shape[1:]), fill.get(key, jnp.nan), x.dtype)])
        for key, x in batch.items()
    }


@pytest.mark.parametrize("name", PRESETS)
def test_order_padding_and_empty_rows(name):
    """Wholly masked rows scale the rest by the rows before over the rows after, where the
    aggregation counts rows; not at all under the token mean."""
    batch, algorithm = make_case(), acting(name)
    value, gradient = run(algorithm, batch)
    order = np.random.default_rng(3).permutation(len(gradient))
    permuted = run(algorithm, {key: x[order] for key, x in batch.items()})
    close(permuted[0], value)
    close(permuted[1], gradient[order])

    pad = {"mask": False}
    padded = {
        key: jnp.pad(x, ((0, 0), (0, 3)), constant_values=pad.get(key, jnp.nan))
        if x.ndim == 2
        else x
        for key, x in batch.items()
    }
    wide = run(algorithm, padded)
    close(wide[0], value)
    close(wide[1], np.pad(gradient, ((0, 0), (0, 3))))

    more = run(algorithm, added(batch, 4, group=0))
    by_row = algorithm.aggregation.func in (
        aggregation.sequence_mean,
        aggregation.sequence_sum,
        aggregation.constant,
    )
    factor = 12 / 16 if by_row else 1
    close(more[0], value * factor)
    close(more[1], np.pad(gradient * factor, ((0, 4), (0, 0))))


@pytest.mark.parametrize(
    ("name", "same_group", "own_group"),
    [
        ("sequence_mean", 3 / 4, 3 / 4),
        ("sequence_sum", 3 / 4, 3 / 4),
        ("constant", 3 / 4, 3 / 4),
        ("token_mean", 1, 1),
        ("token_sum", 1, 1),
        ("prompt_mean", 1, 3 / 4),
    ],
)
def test_what_an_empty_row_counts_for(name, same_group, own_group):
    """Of 12 rows in 3 groups and 4 more, which join a group or are one."""
    algorithm, batch = preset("grpo", f"aggregation={name}"), make_case()
    value, gradient = run(algorithm, batch)
    for group, factor in ((0, same_group), (7, own_group)):
        more = run(algorithm, added(batch, 4, group))
        close(more[0], value * factor)
        close(more[1], np.pad(gradient * factor, ((0, 4), (0, 0))))
