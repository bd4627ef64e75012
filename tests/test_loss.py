"""The loss: masks, micro-batches, sums, identities (public cases K7, K9, K17)."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, clip, kl, ratio
from grpo_jax.loss import policy_loss
from grpo_jax.rules import asks
from grpo_jax.types import Kl
from tests.cases import (
    AGGREGATION,
    BY_PLACE,
    CLIP,
    ENTROPY,
    KL,
    SELECT,
    make_algorithm,
    make_batch,
    one_axis_at_a_time,
    rows_of,
    together,
)

EVERY = one_axis_at_a_time()
TOGETHER = together()
ROW_BY_ROW = together(across_rows=False)
ANY_ORDER = {name: a for name, a in EVERY.items() if name not in BY_PLACE}
ANY_WIDTH = {n: a for n, a in TOGETHER.items() if not asks(a.clip, "key")}  # draws have a place


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def evaluated(algorithm, batch, weight=None):
    """Loss, sums, and d loss / d logp; the weight is that of the batch unless one is given."""
    batch = dict(batch)
    group, logp = batch.pop("group"), batch.pop("logp")
    if weight is None:
        weight = algorithm.aggregation(batch["mask"], group)

    def f(logp):
        return policy_loss(algorithm, logp, weight=weight, **batch)

    (loss, sums), gradient = jax.value_and_grad(f, has_aux=True)(logp)
    return loss, sums, gradient


@cache
def program(algorithm):
    return jax.jit(partial(evaluated, algorithm))


def run(algorithm, batch, weight=None):
    """`evaluated`, compiled once for an algorithm and the batch's shapes."""
    return program(algorithm)(batch, weight)


def tiny(logp, mask, advantage):
    """An on-policy batch of one group."""
    logp, mask = jnp.asarray(logp, float), jnp.asarray(mask, bool)
    return {
        "logp": logp,
        "old_logp": logp,
        "sampler_logp": logp,
        "ref_logp": None,
        "advantage": jnp.asarray(advantage, float),
        "mask": mask,
        "group": jnp.zeros(len(mask), int),
    }


@pytest.mark.parametrize(
    ("name", "expected"), [("sequence_mean", 0.0), ("token_mean", 0.5), ("constant", 0.25)]
)
def test_k17_on_the_first_step_the_ratio_is_one_and_the_gradient_is_not_zero(name, expected):
    rule = partial(aggregation.constant, length=4) if name == "constant" else AGGREGATION[name]
    mask = [[1, 0, 0], [1, 1, 1]]
    batch = tiny([[-1.0, -9, -9], [-0.5, -2.0, -3.0]], mask, [1, -1])
    loss, sums, gradient = run(make_algorithm(aggregation=rule), batch)
    assert loss == pytest.approx(expected, abs=1e-7)
    weight = rule(batch["mask"], batch["group"])
    np.testing.assert_allclose(gradient, -weight * jnp.array([[1.0], [-1.0]]))
    assert sums["ratio"] == sums["tokens"] == 4
    assert sums["clip_low"] == sums["clip_high"] == 0


def test_k17_on_the_second_step_the_clip_acts_against_the_stored_log_probs():
    batch = tiny([[-1.0, -2.0, -1.0, -2.0]], [[1, 1, 1, 1]], [1.0])
    batch["logp"] = batch["old_logp"] + jnp.log(jnp.array([[1.3, 1.1, 0.7, 1.5]]))
    loss, sums, gradient = run(make_algorithm(), batch)
    assert loss == pytest.approx(-(1.2 + 1.1 + 0.7 + 1.2) / 4, rel=1e-6)
    np.testing.assert_allclose(gradient, [[0, -1.1 / 4, -0.7 / 4, 0]], rtol=1e-5)
    assert (sums["clip_high"], sums["clip_low"]) == (2, 0)
    assert sums["ratio"] == pytest.approx(4.6, rel=1e-6)


def test_k7_micro_batches_of_the_whole_weight_add_up():
    loss = [[1, 1, 0, 0], [2, 2, 2, 2]]
    batch = tiny(-np.array(loss), [[1, 1, 0, 0], [1, 1, 1, 1]], [1, 1])
    algorithm = make_algorithm(clip=clip.none, aggregation=aggregation.token_mean)
    assert run(algorithm, batch)[0] == pytest.approx(1.6666667)


def test_k9_a_masked_row_counts_and_gets_no_gradient():
    batch = tiny([[-1.0, -2.0], [-3.0, -4.0]], [[1, 1], [0, 0]], [1, 1])
    loss, _, gradient = run(make_algorithm(clip=clip.none), batch)
    assert loss == pytest.approx(0.75)
    np.testing.assert_allclose(gradient, [[-0.25, -0.25], [0, 0]])


@pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY)
def test_k9_a_batch_with_nothing_in_it(algorithm):
    batch = make_batch()
    batch["mask"] = jnp.zeros_like(batch["mask"])
    loss, sums, gradient = run(algorithm, batch)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)
    assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY)
def test_rubbish_behind_the_mask_reaches_nothing(algorithm):
    clean = make_batch()
    mask = clean["mask"]
    expected = run(algorithm, clean)
    rubbish = np.resize([np.nan, np.inf, -np.inf, np.nan, 1e30], mask.shape)
    batch = dict(clean)
    names = ("logp", "old_logp", "sampler_logp", "ref_logp", "entropy", "exact_kl")
    for shift, name in enumerate(names):
        batch[name] = jnp.where(mask, batch[name], np.roll(rubbish, shift))
    batch["advantage"] = jnp.where(mask.any(1), batch["advantage"], jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, run(algorithm, batch), expected)


@pytest.mark.parametrize("algorithm", TOGETHER.values(), ids=TOGETHER)
def test_an_advantage_of_each_token_is_one_of_the_row_with_rubbish_behind_the_mask(algorithm):
    clean = make_batch()
    rubbish = np.resize([np.nan, np.inf, -np.inf, np.nan, 1e30], clean["mask"].shape)
    by_token = jnp.where(clean["mask"], clean["advantage"][:, None], rubbish)
    loss, _, gradient = run(algorithm, {**clean, "advantage": by_token})
    expected = run(algorithm, clean)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[2], rtol=1e-6)


def test_a_users_rule_that_forgets_the_mask_sees_no_rubbish_either():
    def careless(logp, old_logp, mask):
        return jnp.broadcast_to((logp - old_logp).sum(1, keepdims=True), logp.shape)

    clean = make_batch()
    batch = dict(clean, old_logp=jnp.where(clean["mask"], clean["old_logp"], jnp.nan))
    expected = run(make_algorithm(ratio=ratio.sequence_sum), clean)
    got = run(make_algorithm(ratio=careless), batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-12)


@pytest.mark.parametrize("algorithm", ANY_WIDTH.values(), ids=ANY_WIDTH)
def test_padding_changes_nothing(algorithm):
    batch = make_batch()
    padded = {name: jnp.pad(x, ((0, 0), (0, 3))) if x.ndim == 2 else x for name, x in batch.items()}
    narrow, wide = run(algorithm, batch), run(algorithm, padded)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), narrow[:2], wide[:2])
    np.testing.assert_allclose(wide[2], np.pad(narrow[2], ((0, 0), (0, 3))), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ANY_ORDER.values(), ids=ANY_ORDER)
def test_permuting_rows_permutes_gradients(algorithm):
    batch = make_batch()
    order = np.random.default_rng(3).permutation(len(batch["mask"]))
    moved = rows_of(batch, order)
    loss, sums, gradient = run(algorithm, batch)
    moved_loss, moved_sums, moved_gradient = run(algorithm, moved)
    np.testing.assert_allclose(moved_loss, loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved_gradient, gradient[order], rtol=1e-5, atol=1e-8)
    for name, value in sums.items():
        np.testing.assert_allclose(moved_sums[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", ROW_BY_ROW.values(), ids=ROW_BY_ROW)
def test_losses_gradients_and_sums_add_up_over_any_micro_batches(algorithm):
    batch = make_batch()
    weight = algorithm.aggregation(batch["mask"], batch["group"])
    loss, sums, gradient = run(algorithm, batch, weight)
    for size in (1, 4):  # tests/test_invariance.py has more, through the learner
        parts = [
            run(algorithm, rows_of(batch, at), jnp.asarray(np.asarray(weight)[at]))
            for at in (slice(i, i + size) for i in range(0, len(weight), size))
        ]
        np.testing.assert_allclose(sum(p[0] for p in parts), loss, rtol=1e-12)
        for name, value in sums.items():
            total = sum(p[1][name] for p in parts)
            np.testing.assert_allclose(total, value, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(np.concatenate([p[2] for p in parts]), gradient)


def test_the_sums_are_what_their_names_say():
    batch = make_batch()
    algorithm = make_algorithm(kl=Kl(kl.k3, 0.04, "loss"))
    loss, sums, _ = run(algorithm, batch)
    mask, advantage = np.asarray(batch["mask"]), np.asarray(batch["advantage"])[:, None]
    rho = np.exp(np.asarray(batch["logp"] - batch["old_logp"]))
    d = np.asarray(batch["logp"] - batch["ref_logp"])
    weight = np.asarray(algorithm.aggregation(batch["mask"], batch["group"]))
    k3 = np.exp(-d) + d - 1
    expected = {
        "tokens": mask.sum(),
        "clip_low": (mask & (advantage < 0) & (rho < 0.8)).sum(),
        "clip_high": (mask & (advantage > 0) & (rho > 1.2)).sum(),
        "selected": mask.sum(),
        "ratio": rho[mask].sum(),
        "kl": k3[mask].sum(),
        "penalty": 0.04 * (weight * k3).sum(),
        "objective": 0.04 * (weight * k3).sum() - loss,
        "bonus": 0,
    }
    assert expected["clip_low"] > 0
    assert expected["clip_high"] > 0
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-12)


def test_only_what_the_policy_says_has_a_gradient():
    batch = make_batch()
    group, key = batch.pop("group"), batch.pop("key")
    mask, logp = batch.pop("mask"), batch.pop("logp")
    weight = make_algorithm().aggregation(mask, group)

    def moving(**axes):
        """The arguments beside logp that a gradient flows through."""

        def loss(given):
            algorithm = make_algorithm(**axes)
            return policy_loss(algorithm, logp, mask=mask, weight=weight, key=key, **given)[0]

        gradients = jax.jit(jax.grad(loss))(batch)
        return {name for name, x in gradients.items() if (x != 0).any()}

    assert moving(kl=KL["k3"]) == set()
    assert moving(kl=KL["exact"]) == {"exact_kl"}
    assert moving(entropy=ENTROPY["bonus"], kl=KL["k3_weighted"]) == {"entropy"}
    assert moving(select=SELECT["top_entropy"], clip=CLIP["clip_cov"]) == set()

    def logged(logp):
        algorithm = make_algorithm(kl=KL["k3"])
        return policy_loss(algorithm, logp, mask=mask, weight=weight, **batch)[1]["kl"]

    np.testing.assert_array_equal(jax.grad(logged)(logp), 0)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("entropy", {"select": SELECT["top_entropy"]}),
        ("entropy", {"entropy": ENTROPY["bonus"]}),
        ("exact", {"kl": KL["exact"]}),
        ("key", {"clip": CLIP["clip_cov"]}),
    ],
)
def test_a_rule_that_gets_nothing_for_what_it_needs_says_so(name, axes):
    batch = make_batch() | {"entropy": None, "exact_kl": None, "key": None}
    with pytest.raises(ValueError, match=name):
        run(make_algorithm(**axes), batch)


def test_kl_acts_in_the_loss_only_where_it_is_asked_to():
    batch = make_batch()
    plain = run(make_algorithm(), batch)
    for idle in (Kl(kl.k3, 0.0, "loss"), Kl(kl.k3, 0.04, "reward")):
        for reference in (None, jnp.full_like(batch["logp"], jnp.nan)):
            loss, sums, gradient = run(make_algorithm(kl=idle), {**batch, "ref_logp": reference})
            assert loss == plain[0]
            np.testing.assert_array_equal(gradient, plain[2])
            assert sums["kl"] == sums["penalty"] == 0
    active = make_algorithm(kl=Kl(kl.k3, 0.04, "loss"))
    assert run(active, batch)[0] > plain[0]
    with pytest.raises(ValueError, match="ref_logp"):
        run(active, {**batch, "ref_logp": None})


def test_a_dead_group_still_feels_the_kl():
    batch = make_batch()
    batch["advantage"] = jnp.zeros_like(batch["advantage"])
    assert (run(make_algorithm(), batch)[2] == 0).all()
    pulled = run(make_algorithm(kl=Kl(kl.k3, 0.04, "loss")), batch)[2]
    assert (jnp.abs(pulled) > 0).sum() == batch["mask"].sum()


@pytest.mark.parametrize("wide", [False, True])
def test_on_policy_the_clips_share_one_gradient_to_the_last_digit(wide):
    with jax.enable_x64(wide):
        batch = make_batch()
        off_policy = [run(make_algorithm(clip=CLIP[n]), batch)[2] for n in ("symmetric", "higher")]
        assert (off_policy[0] != off_policy[1]).any()
        batch["old_logp"] = batch["logp"]
        expected = run(make_algorithm(clip=CLIP["symmetric"]), batch)[2]
        assert jnp.abs(expected).max() > 0
        for name, rule in CLIP.items():
            gradient = run(make_algorithm(clip=rule), batch)[2]
            if name in ("sapo", "gmpo"):  # by way of a sigmoid, or of a mean over the row
                np.testing.assert_allclose(gradient, expected, rtol=1e-5)
            elif name == "clip_cov":  # loses tokens on policy too
                assert ((gradient == expected) | (gradient == 0)).all()
            else:
                np.testing.assert_array_equal(gradient, expected)


def test_on_policy_gspo_is_grpo_under_the_sequence_mean():
    batch = make_batch()
    batch["old_logp"] = batch["logp"]
    token = run(make_algorithm(), batch)[2]
    sequence = run(make_algorithm(ratio=ratio.sequence), batch)[2]
    np.testing.assert_allclose(sequence, token, rtol=1e-5, atol=1e-9)
    token_mean = [
        run(make_algorithm(ratio=r, aggregation=aggregation.token_mean), batch)[2]
        for r in (ratio.token, ratio.sequence)
    ]
    np.testing.assert_allclose(*token_mean, rtol=1e-5, atol=1e-9)  # only while on policy


def test_dr_grpo_is_token_mean_times_tokens_over_rows_and_length():
    batch = make_batch()
    rows, tokens, length = len(batch["mask"]), float(batch["mask"].sum()), 16
    constant = run(make_algorithm(aggregation=AGGREGATION["constant"]), batch)[2]
    token_mean = run(make_algorithm(aggregation=aggregation.token_mean), batch)[2]
    np.testing.assert_allclose(constant, token_mean * tokens / (rows * length), rtol=1e-5)


def test_constants_may_be_swept_in_one_jit():
    batch = make_batch()

    def loss(low, high, length):
        algorithm = make_algorithm(
            clip=partial(clip.bounded, low=low, high=high),
            aggregation=partial(aggregation.constant, length=length),
        )
        return evaluated(algorithm, batch)[0]

    knobs = jnp.array([[0.2, 0.2, 16.0], [0.2, 0.28, 16.0], [0.1, 0.2, 8.0]])
    swept = jax.jit(jax.vmap(loss))(*knobs.T)
    for value, (low, high, length) in zip(swept, knobs.tolist(), strict=True):
        np.testing.assert_allclose(value, loss(low, high, length), rtol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_the_float_dtype_of_the_inputs_is_kept(wide):
    with jax.enable_x64(wide):
        for algorithm in (make_algorithm(), make_algorithm(kl=Kl(kl.k3, 0.04, "loss"))):
            out = run(algorithm, make_batch())
            assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.asarray(0.0).dtype}
