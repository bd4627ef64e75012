"""Bugs reported in public against other codebases, with what is right: the loss.

K6 K7 K9 K10 K11 K13 K14 K15 K17 K18. The others are in test_public_cases.py. A test's docstring
names the reports (owner/repo#number); `wrong` is what was reported and must not come out.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, clip, filter, kl, ratio
from grpo_jax.learner import make_gradient
from grpo_jax.loss import policy_loss
from grpo_jax.policy import PolicySettings
from grpo_jax.types import Batch, Filter, Kl, Rollout
from tests.cases import make_algorithm
from tests.fixtures import bigram, table
from tests.test_rollout import collect, collector

BUDGET = 4  # tokens
AGGREGATION = {
    "sequence_mean": aggregation.sequence_mean,
    "token_mean": aggregation.token_mean,
    "constant": partial(aggregation.constant, length=BUDGET),
    "prompt_mean": aggregation.prompt_mean,
    "sequence_sum": aggregation.sequence_sum,
    "token_sum": aggregation.token_sum,
}
# of two answers to one prompt: 1 a token for the short one, 2 a token for the long one
LOSS = np.array([[1.0, 1, 0, 0], [2, 2, 2, 2]])
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
EXPECTED = {"sequence_mean": 1.5, "token_mean": 1.6666667, "constant": 1.25}
SYMMETRIC = partial(clip.bounded, low=0.2, high=0.2)
HIGHER = partial(clip.bounded, low=0.2, high=0.28)


def run(algorithm, logp, mask, advantage, old_logp=None, ref_logp=None, weight=None):
    """(loss, sums, d loss / d logp); on policy unless `old_logp` is given, one prompt's answers."""
    logp, mask = jnp.asarray(logp, jnp.float32), jnp.asarray(mask, bool)
    old_logp = logp if old_logp is None else jnp.asarray(old_logp, jnp.float32)
    if weight is None:
        weight = algorithm.aggregation(mask, jnp.zeros(len(mask), int))

    def loss(logp):
        return policy_loss(
            algorithm,
            logp,
            old_logp=old_logp,
            sampler_logp=old_logp,
            ref_logp=ref_logp,
            advantage=jnp.asarray(advantage, jnp.float32),
            mask=mask,
            weight=weight,
        )

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
    return float(value), sums, np.asarray(gradient)


def at(rule, rho, advantage):
    """(objective, its derivative by log p, clipped) of single tokens, each a row."""
    log_ratio = jnp.log(jnp.asarray(rho, jnp.float32)).reshape(-1, 1)
    advantage = jnp.broadcast_to(
        jnp.asarray(advantage, jnp.float32).reshape(-1, 1), log_ratio.shape
    )
    mask = jnp.ones(log_ratio.shape, bool)

    def objective(shift):
        logp = shift - 1.0
        value, clipped = rule(log_ratio + shift, advantage, logp, mask)
        return value.sum(), (value, clipped)

    slope, (value, clipped) = jax.grad(objective, has_aux=True)(jnp.zeros_like(log_ratio))
    return value.ravel(), slope.ravel(), clipped.ravel()


# ------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize("name", EXPECTED)
def test_k6_one_batch_and_what_each_aggregation_makes_of_it(name):
    """huggingface/trl#2995, allenai/open-instruct#636, AI-Hypercomputer/maxtext#4025,
    linkedin/Liger-Kernel#628."""
    algorithm = make_algorithm(clip=clip.none, aggregation=AGGREGATION[name])
    assert run(algorithm, -LOSS, MASK, [1, 1])[0] == pytest.approx(EXPECTED[name], rel=1e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_k6_the_kl_is_aggregated_as_the_policy_term_is(name):
    """huggingface/trl#2995 (a comment)."""
    only_kl = make_algorithm(kl=Kl(kl.k1, 1.0, "loss"), aggregation=AGGREGATION[name])
    reference = jnp.asarray(-LOSS, jnp.float32)  # the policy's log-probs are 0
    value = run(only_kl, np.zeros((2, 4)), MASK, [0, 0], ref_logp=reference)[0]
    assert value == pytest.approx(EXPECTED[name], rel=1e-6)


def k6_on_a_model():
    """(model, parameters, batch) whose token losses are K6's, for `clip=none`: log p of token 0 is
    -1 after any token, that of token 1 is -2."""
    p = np.exp([-1.0, -2.0])
    params = table(np.tile(np.log([*p, 1 - p.sum()]), (3, 1)))
    zeros = jnp.zeros((2, 4))
    rollout = Rollout(
        prompt=jnp.array([[2], [2]]),
        prompt_mask=jnp.ones((2, 1), bool),
        completion=jnp.array([[0] * 4, [1] * 4]),
        mask=jnp.asarray(MASK),
        sampler_logp=zeros,
        truncated=jnp.zeros(2, bool),
        version=jnp.zeros(2, int),
    )
    keep, group = jnp.ones(2, bool), jnp.zeros(2, int)
    return bigram(), params, Batch(rollout, jnp.ones(2), zeros, None, keep, group)


def cut_into(rows, rule):
    """Loss and gradient of K6 in micro-batches of `rows`."""
    model, params, batch = k6_on_a_model()
    algorithm = make_algorithm(clip=clip.none, aggregation=rule)
    gradient = make_gradient(algorithm, model, PolicySettings(1.0, rows, 3))
    value, _, slope = jax.jit(gradient)(params, batch, None, None, None)
    return float(value), np.asarray(slope["head"]["embedding"])


def test_k7_micro_batches_add_up_to_the_whole():
    """huggingface/trl#5619, huggingface/trl#6024, huggingface/trl#3021, ms-swift#10117,
    ms-swift#10116, allenai/open-instruct#1161."""
    whole, parts = (cut_into(rows, aggregation.token_mean) for rows in (2, 1))
    assert whole[0] == pytest.approx(1.6666667, rel=1e-6)
    assert parts[0] == pytest.approx(1.6666667, rel=1e-6)  # wrong: 1.5, or 0.8333333
    assert abs(whole[1]).max() > 0.1
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6, atol=1e-7)
    # the mistake itself, which there is for ablations alone
    local = cut_into(1, partial(aggregation.local, rows=1, rule=aggregation.token_mean))
    assert local[0] == pytest.approx(1.5, rel=1e-6)
    assert abs(local[1] - whole[1]).max() > 0.01


def test_k9_a_wholly_masked_row_counts_among_the_rows_and_has_no_gradient():
    """unslothai/unsloth-zoo#1286, unslothai/unsloth-zoo#1262, huggingface/trl#3248.

    As TRL. 1.5 would be the mean over the rows that have tokens.
    """
    algorithm = make_algorithm(clip=clip.none)
    value, _, gradient = run(algorithm, [[-1, -2], [-3, -4]], [[1, 1], [0, 0]], [1, 1])
    assert value == pytest.approx(0.75, rel=1e-6)
    np.testing.assert_allclose(-gradient, [[0.25, 0.25], [0, 0]], rtol=1e-6)  # by the token's loss


@pytest.mark.parametrize("name", AGGREGATION)
def test_k9_a_batch_without_a_token_gives_zeros(name):
    """unslothai/unsloth-zoo#1286, unslothai/unsloth-zoo#1262, huggingface/trl#3248."""
    algorithm = make_algorithm(kl=Kl(kl.k3, 0.04, "loss"), aggregation=AGGREGATION[name])
    nothing = jnp.full((2, 4), jnp.nan)
    value, sums, gradient = run(algorithm, -LOSS, MASK & False, [1, -1], nothing, nothing)
    assert value == 0 and (gradient == 0).all()
    assert sums["kl"] == 0 and all(jnp.isfinite(x) for x in sums.values())


# ---------------------------------------------------------------------------- clip and ratio


@pytest.mark.parametrize(
    ("rho", "advantage", "symmetric", "higher"),
    [
        (0.5, 1, 0.5, 0.5),
        (0.5, -1, -0.8, -0.8),
        (1.25, 1, 1.2, 1.25),
        (1.3, 1, 1.2, 1.28),
        (1.3, -1, -1.3, -1.3),
        (10, -1, -10, -10),
    ],
)
def test_k10_the_surrogate(rho, advantage, symmetric, higher):
    """huggingface/trl#3032, huggingface/trl#3289, ChenmienTan/RL2#21 (low in place of 1 - low),
    areal-project/AReaL#285."""
    assert at(SYMMETRIC, rho, advantage)[0][0] == pytest.approx(symmetric, rel=1e-5)
    assert at(HIGHER, rho, advantage)[0][0] == pytest.approx(higher, rel=1e-5)


def test_k10_the_gradient_is_gone_where_the_clip_is_at_work_and_nowhere_else():
    """huggingface/trl#3032, areal-project/AReaL#285."""
    slope = at(SYMMETRIC, [1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1])[1]
    np.testing.assert_allclose(slope, [0, -1.5, 0.5, 0], rtol=1e-5)


def test_k10_the_fractions_count_the_side_that_is_at_work():
    """huggingface/trl#3289."""
    old = -np.log([[0.7], [1.3], [1.3], [0.7]])
    sums = run(make_algorithm(), np.zeros((4, 1)), np.ones((4, 1)), [1, 1, -1, -1], old)[1]
    low, high = float(sums["clip_low"]), float(sums["clip_high"])
    assert (low / 4, high / 4, (low + high) / 4) == (0.25, 0.25, 0.5)  # wrong: 1, all outside


def test_k14_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens():
    """MakazhanAlpamys/Soup#723, MakazhanAlpamys/Soup#744, agentscope-ai/Trinity-RFT#154,
    verl-project/verl#2775."""
    logp = jnp.array([[0.2, -0.1, 0.4, 9.0], [0.3, 0.3, -9.0, jnp.nan]])
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    log_ratio = ratio.sequence(logp, jnp.zeros_like(logp), mask)
    s = np.exp(log_ratio[:, 0])
    np.testing.assert_allclose(s, [1.18136041, 1.34985881], rtol=1e-6)
    for wrong in ([1.64872127, 1.8221188], [1.13314845, 1.16183424]):  # no length; padding counts
        assert abs(s - wrong).min() > 0.01
    # the clip acts on it, an answer at a time, though each answer has a token on the other side
    clipped = partial(clip.bounded, low=0.2, high=0.2)(log_ratio, jnp.ones((2, 1)), logp, mask)[1]
    np.testing.assert_array_equal(clipped, mask & jnp.array([[False], [True]]))


@pytest.mark.parametrize("advantage", [1, -1])
def test_k15_a_clipped_weight_keeps_its_gradient(advantage):
    """areal-project/AReaL#1421, allenai/open-instruct#1264, linkedin/Liger-Kernel#1054,
    THUDM/slime#2067.

    `cispo` has the cap 1 + high, as AReaL and slime; `cispo_cap` the absolute one of TRL and Liger.
    """
    relative = partial(clip.cispo, low=1.0, high=0.28)
    absolute = partial(clip.cispo_cap, cap=1.28)
    for rule in (relative, absolute):
        assert at(rule, 1.5, advantage)[1][0] == pytest.approx(1.28 * advantage, rel=1e-6)
    assert at(HIGHER, 1.5, 1)[1][0] == 0  # PPO's clip


@pytest.mark.parametrize(
    ("name", "value"), [("sequence_mean", 0), ("token_mean", 0.5), ("constant", 0.25)]
)
def test_k17_at_ratio_one_there_is_a_gradient(name, value):
    """huggingface/trl#2752, huggingface/trl#3493, huggingface/trl#3757, unsloth-zoo#832."""
    mask = np.array([[1, 0, 0], [1, 1, 1]], bool)
    algorithm = make_algorithm(aggregation=AGGREGATION[name])
    loss, sums, gradient = run(algorithm, -np.arange(6.0).reshape(2, 3), mask, [1, -1])
    assert loss == pytest.approx(value, abs=1e-6)
    assert sums["ratio"] == sums["tokens"] == 4  # exactly 1 each
    assert (np.sign(gradient) == mask * [[-1], [1]]).all()


def test_k17_after_an_update_the_stored_log_probs_make_the_clip_act():
    """huggingface/trl#2752, huggingface/trl#3493: recomputed in the loss, it never would."""
    old = np.full((2, 3), -1.0)
    now = old + np.log([[1.5, 1.1, 0.7], [1.5, 1.1, 0.7]])
    _, sums, gradient = run(make_algorithm(), now, np.ones((2, 3)), [1, -1], old)
    assert float(sums["ratio"]) == pytest.approx(2 * (1.5 + 1.1 + 0.7), rel=1e-5)
    assert (sums["clip_high"], sums["clip_low"]) == (1, 1)
    assert (gradient == 0).tolist() == [[True, False, False], [False, False, True]]


# ---------------------------------------------------------------------------------------- kl


@pytest.mark.parametrize(
    ("d", "k1", "k2", "k3", "slope"),
    [
        (0.5, 0.5, 0.125, 0.10653066, 0.39346933),
        (-0.5, -0.5, 0.125, 0.14872122, -0.64872122),
        (0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_k13_the_estimators_and_their_signs(d, k1, k2, k3, slope):
    """Rolv-Arild/rocket-learn#12, databricks/compose-rl#44."""
    logp, ref_logp = jnp.full((1, 1), d - 1.0), jnp.full((1, 1), -1.0)
    for rule, value in ((kl.k1, k1), (kl.k2, k2), (kl.k3, k3)):
        assert float(rule(logp, ref_logp)[0, 0]) == pytest.approx(value, abs=1e-6)
    gradient = jax.grad(lambda x: kl.k3(x, ref_logp).sum())(logp)
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-6)


def test_k13_k3_is_never_negative_and_on_average_the_kl_of_the_policy_to_the_reference():
    """Rolv-Arild/rocket-learn#12, databricks/compose-rl#44."""
    policy, reference = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (2, 50)))
    k3 = kl.k3(policy[None], reference[None])[0]
    assert (k3 >= 0).all()
    right = (jnp.exp(policy) * (policy - reference)).sum()
    wrong = (jnp.exp(reference) * (reference - policy)).sum()  # of the reference to the policy
    mean = float((jnp.exp(policy) * k3).sum())
    assert mean == pytest.approx(float(right), rel=1e-5) and abs(mean - wrong) > 0.05


def test_k11_a_reference_far_above_the_policy_overflows_neither_value_nor_gradient():
    """huggingface/trl#3015, huggingface/trl#6549, huggingface/trl#6637, OpenRLHF/OpenRLHF#1335,
    google/tunix#1560, THUDM/slime#2198."""

    def both(rule, d):
        return jax.value_and_grad(lambda x: rule(x, jnp.zeros((1, 1))).sum())(jnp.full((1, 1), d))

    def plain(logp, ref_logp):
        return jnp.exp(ref_logp - logp) - (ref_logp - logp) - 1

    value, gradient = both(kl.k3, -100.0)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and value > 1e8
    value, gradient = both(plain, -100.0)
    assert jnp.isinf(value) and jnp.isinf(gradient).all()  # wrong
    value, gradient = both(lambda *x: jnp.minimum(plain(*x), 10), -100.0)
    assert value == 10 and not jnp.isfinite(gradient).all()  # the output bounded: wrong too
    for d in (-10.0, -3.0, 3.0, 10.0):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), both(kl.k3, d), both(plain, d))
    assert jnp.isnan(both(kl.k3, jnp.nan)[0])


def test_k18_a_dead_group_still_feels_the_kl():
    """huggingface/trl#5640, huggingface/trl#7068, huggingface/trl#6365: kept, as in TRL."""
    algorithm = make_algorithm(kl=Kl(kl.k3, 0.1, "loss"))
    logp, ref_logp = np.full((1, 2), -1.0), jnp.array([[-1.5, -0.5]])
    assert (run(make_algorithm(), logp, np.ones((1, 2)), [0])[2] == 0).all()
    value, _, gradient = run(algorithm, logp, np.ones((1, 2)), [0], ref_logp=ref_logp)
    assert value == pytest.approx(0.1 * (0.10653066 + 0.14872122) / 2, rel=1e-5)
    np.testing.assert_allclose(gradient, [[0.05 * 0.39346933, -0.05 * 0.64872122]], rtol=1e-5)


def test_k18_unless_dead_groups_are_dropped():
    """huggingface/trl#5640: the option that was asked for, `filter=drop`."""
    texts = ["1", "1", "1", "2"]  # a dead group and a live one
    assert collect(collector(texts)).batch.keep.all()
    drop = Filter(filter.mixed, "correct", max_rounds=1, on_exhausted="partial")
    data = collect(collector(texts, filter=drop))
    assert list(data.answers.texts) == ["1", "2", "1", "1"]  # what is kept comes first
    assert data.batch.keep.tolist() == [True, True, False, False]
