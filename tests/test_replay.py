"""replay.py: a recorded rollout through other objectives, against direct gradients."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import recording
from grpo_jax.answers import Answers, RolloutSettings
from grpo_jax.kernels import baseline, clip, filter, kl, scale, select, shaping, truncation
from grpo_jax.learner import make_gradient
from grpo_jax.loss import policy_loss
from grpo_jax.policy import PolicySettings, make_exact_kl, make_logprobs, token_stats
from grpo_jax.replay import (
    Bin,
    Objective,
    Passes,
    ReplayError,
    batch_for,
    cosines,
    gradient_shares,
    loss_and_cotangent,
    make_bins,
    measure,
    replay,
)
from grpo_jax.rewards.combine import RewardPart, RewardTable
from grpo_jax.rollout import Collection, Collector
from grpo_jax.tasks.base import Prompt
from grpo_jax.types import Entropy, Filter, Kl
from tests import fixtures
from tests.cases import AGGREGATION, CLIP, CORRECTION, KL, RATIO, make_algorithm
from tests.fixtures import assert_trees_equal, bigram, small_llama

N, G, STEP = 4, 4, 3
SETTINGS = PolicySettings(temperature=0.8, micro_batch_rows=4, vocab_chunk=16)
WEIGHTS = {"correct": 1.0, "style": 0.5}
MIXED = Filter(partial(filter.mixed, tol=1e-6), "correct", max_rounds=3, on_exhausted="partial")


@cache
def policy():
    return bigram(), bigram().init(jax.random.key(3))


def nudged(params, size, seed):
    """The weights a little elsewhere."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return tree.unflatten([leaf + size * jax.random.normal(k, leaf.shape) for leaf, k in pairs])


def some_answers():
    """Group 0 is all right, group 1 all wrong with an answer cut off, and in the other two one
    answer can't be scored."""
    rng = np.random.default_rng(5)
    rollout = jax.tree.map(np.asarray, fixtures.make_batch(N, G, seed=2).rollout)
    rollout = replace(
        rollout,
        prompt=rollout.prompt[::G].repeat(G, 0),  # one for each group, as the collector promises
        version=np.full(N * G, STEP, np.int32),
        truncated=np.arange(N * G) == 5,
    )
    correct = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, np.nan, 1, 0]], np.float32)
    parts = {"correct": correct.reshape(-1), "style": rng.uniform(size=N * G).astype(np.float32)}
    none = dict.fromkeys(parts, 0)
    return Answers(
        prompts=tuple(Prompt(f"{i}:", "1") for i in range(N)),
        rollout=rollout,
        texts=("x",) * (N * G),
        rewards=RewardTable(sum(WEIGHTS[n] * parts[n] for n in parts), parts, none, none, {}),
        numbers=tuple(range(N)),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of a policy that has moved since. The shape is of another, and not looked at."""
    model, before = policy()
    answers = some_answers()
    old_logp, _ = make_logprobs(model, SETTINGS)(before, answers.rollout)
    batch = fixtures.make_batch(N, G)
    batch = replace(batch, old_logp=old_logp, keep=jnp.ones(N * G, bool))
    moment = recording.Moment(STEP, 8, 2.0, 0.25, WEIGHTS, {"seed": 0})
    params = {
        "before": before,
        "after": nudged(before, 0.03, 1),
        "reference": nudged(before, 0.1, 2),
    }
    folder = tmp_path_factory.mktemp("run")
    data = Collection(batch, answers, 0, {})
    return recording.load(recording.record(folder, moment, small_llama()[0].config, data, params))


@pytest.fixture(scope="module")
def passes(recorded):
    return Passes(recorded, bigram(), SETTINGS)


LOSSES = {
    "grpo": make_algorithm(kl=KL["k3"]),
    "dr_grpo": make_algorithm(scale=scale.none, aggregation=AGGREGATION["constant"]),
    "gspo": make_algorithm(
        ratio=RATIO["sequence"], clip=partial(clip.bounded, low=0.01, high=0.01)
    ),
    "cispo": make_algorithm(clip=CLIP["cispo"], aggregation=AGGREGATION["token_mean"]),
    "corrected": make_algorithm(correction=CORRECTION["token_truncate"]),
    "entropy": make_algorithm(
        select=partial(select.top_entropy, share=0.5), entropy=Entropy(0.1, None)
    ),
    "exact": make_algorithm(kl=Kl(kl.exact, 0.5, "loss")),
}
# what acts before the loss
BATCHES = {
    "grpo": LOSSES["grpo"],
    "leave_one_out": make_algorithm(baseline=baseline.leave_one_out, scale=scale.none),
    "filtered": make_algorithm(filter=MIXED),
    "cut_off": make_algorithm(truncation=truncation.mask),
    "overlong": make_algorithm(
        shaping=partial(shaping.overlong, limit=6, buffer_share=0.5, penalty=1.0)
    ),
    "reward_kl": make_algorithm(kl=Kl(kl.k1, 0.3, "reward")),
    "reward_exact": make_algorithm(kl=Kl(kl.exact, 0.3, "reward")),
}


# ---------------------------------------------------------------------- against training's own


@pytest.mark.parametrize(
    ("name", "at"), [("grpo", "before"), *((name, "after") for name in LOSSES)]
)
def test_loss_and_gradient_are_those_of_the_training_loss(recorded, passes, name, at):
    algorithm, model = LOSSES[name], bigram()
    batch = batch_for(passes, algorithm)
    outcome, gradient = measure(passes, Objective(name, algorithm), at, make_bins(recorded))
    params, other = passes.params(at), passes.params("reference") if name == "exact" else None
    mask = batch.rollout.mask & batch.keep[:, None]

    def direct(params):
        stats = token_stats(model, SETTINGS, params, batch.rollout, other)
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
        )[0]

    value, wanted = jax.jit(jax.value_and_grad(direct))(params)
    close = {"atol": 2e-6, "rtol": 1e-4}
    np.testing.assert_allclose(outcome.loss, value, **close)
    assert_trees_equal(gradient, wanted, **close)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(wanted)))
    np.testing.assert_allclose(outcome.grad_norm, norm, rtol=1e-4)
    assert norm > 0.01
    if (name, at) in (("grpo", "after"), ("entropy", "after")):
        learner = jax.jit(make_gradient(algorithm, model, SETTINGS))
        value, sums, again = learner(params, batch, None, other, jax.random.key(0))
        np.testing.assert_allclose(outcome.loss, value, **close)
        assert_trees_equal(gradient, again, **close)
        np.testing.assert_allclose(outcome.clip_high, sums["clip_high"] / sums["tokens"], rtol=1e-6)
        np.testing.assert_allclose(outcome.clip_low, sums["clip_low"] / sums["tokens"], rtol=1e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_the_batch_is_the_one_a_run_would_make(recorded, passes, name):
    model, algorithm = bigram(), BATCHES[name]
    collector = Collector(
        algorithm=algorithm,
        task=None,
        tokenizer=None,
        sampler=None,
        parts=[RewardPart(n, len, weight) for n, weight in WEIGHTS.items()],
        settings=RolloutSettings(N, G, 3, 6, 1.0, 1.0, 0),
        logprobs=make_logprobs(model, SETTINGS),
        exact_kl=make_exact_kl(model, SETTINGS),
        seed=0,
    )
    answers = recorded.answers
    weights = [passes.params(n) for n in ("before", "reference")]
    known = collector._start(*weights, answers.rollout)
    wanted, _ = collector._batch(known, answers, collector._keep(answers), STEP)
    assert_trees_equal(batch_for(passes, algorithm), wanted, atol=1e-5, rtol=1e-5)
    assert np.abs(wanted.advantage).sum() > 1


def test_what_the_axes_before_the_loss_do_here(passes):
    keep = {name: np.asarray(batch_for(passes, BATCHES[name]).keep) for name in BATCHES}
    assert keep["grpo"].sum() == 15 and not keep["grpo"][13]  # unscorable
    assert keep["filtered"].sum() == 7 and not keep["filtered"][:8].any()
    assert keep["cut_off"].sum() == 14 and not keep["cut_off"][5]


# ---------------------------------------------------------------------------- what must be so


def on_policy_family():
    clips = {"symmetric": CLIP["symmetric"], "higher": CLIP["higher"], "cispo": CLIP["cispo"]}
    return [Objective(name, make_algorithm(clip=rule)) for name, rule in clips.items()]


def test_on_policy_the_clip_rules_are_one_and_later_they_are_not(recorded):
    model = bigram()
    first = replay(recorded, on_policy_family(), model, SETTINGS, at="before")
    np.testing.assert_allclose(first.cosine, 1, atol=1e-5)
    np.testing.assert_allclose([o.grad_norm for o in first.outcomes], first.outcomes[0].grad_norm)
    assert all(o.clip_low == o.clip_high == 0 for o in first.outcomes)
    later = replay(recorded, on_policy_family(), model, SETTINGS)
    np.testing.assert_allclose(np.diag(later.cosine), 1, atol=1e-6)
    np.testing.assert_array_equal(later.cosine, later.cosine.T)
    assert later.cosine[0, 2] < 0.999
    symmetric, higher, _ = later.outcomes
    assert symmetric.clip_low == higher.clip_low > 0
    assert symmetric.clip_high > higher.clip_high > 0
    assert (first.at, later.at, later.step) == ("before", "after", STEP)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant", "token_mean"])
def test_on_policy_a_tokens_share_is_its_weight_times_its_advantage(recorded, passes, aggregation):
    algorithm = make_algorithm(aggregation=AGGREGATION[aggregation])
    bins = make_bins(recorded)
    outcome, _ = measure(passes, Objective("x", algorithm), "before", bins)
    batch = batch_for(passes, algorithm)
    mask = batch.rollout.mask & batch.keep[:, None]
    rows = np.asarray(algorithm.aggregation(mask, batch.group)).sum(-1) * np.abs(batch.advantage)
    wanted = [rows[bin.rows].sum() / rows.sum() for bin in bins]
    np.testing.assert_allclose(outcome.shares, wanted, atol=1e-5)
    for kind in ("outcome", "length", "pass rate"):
        shares = [s for s, bin in zip(outcome.shares, bins, strict=True) if bin.kind == kind]
        np.testing.assert_allclose(sum(shares), 1, atol=1e-6)


def test_without_a_baseline_only_right_answers_have_a_gradient(recorded, passes):
    reward = replace(recorded.moment, weights={"correct": 1.0})
    alone = replace(passes, recording=replace(recorded, moment=reward), _made={}, _programs={})
    reinforce = make_algorithm(baseline=baseline.none, scale=scale.none, clip=clip.none)
    bins = make_bins(recorded)
    outcome, _ = measure(alone, Objective("reinforce", reinforce), "after", bins)
    shares = {bin.name: share for bin, share in zip(bins, outcome.shares, strict=True)}
    assert shares["right"] == 1 and shares["wrong"] == shares["none"] == 0
    assert outcome.kept == 15 / 16


def test_an_objective_without_a_gradient_has_neither_shares_nor_cosines(recorded):
    nothing = Filter(lambda score: jnp.zeros(len(score), bool), None, 1, "partial")
    pair = [Objective("all", make_algorithm()), Objective("no", make_algorithm(filter=nothing))]
    result = replay(recorded, pair, bigram(), SETTINGS)
    assert result.outcomes[1].kept == result.outcomes[1].loss == result.outcomes[1].grad_norm == 0
    assert np.isnan(result.outcomes[1].shares).all()
    np.testing.assert_allclose(result.cosine, [[1, np.nan], [np.nan, np.nan]], atol=1e-6)


def test_the_coefficient_of_the_bonus(recorded, passes):
    def bonus(entropy, coef=None):
        objective = Objective("x", make_algorithm(entropy=entropy), coef)
        return measure(passes, objective, "after", ())[0].loss

    def adapt(coef, entropy):
        return coef * 0, coef + 0.1 * entropy

    plain = bonus(Entropy(0.0, None))
    unit = plain - bonus(Entropy(1.0, None))  # the bonus is taken off the loss
    assert unit > 1
    np.testing.assert_allclose(plain - bonus(Entropy(0.5, None)), 0.5 * unit, rtol=1e-4)
    # adapted once, to the 2 nats that were recorded; but a run's own is what it was by then
    np.testing.assert_allclose(plain - bonus(Entropy(0.5, adapt)), 0.7 * unit, rtol=1e-4)
    np.testing.assert_allclose(plain - bonus(Entropy(0.5, adapt), 0.25), 0.25 * unit, rtol=1e-4)


def test_a_rule_that_draws_gets_the_key_of_the_first_update(passes):
    def rule(log_ratio, advantage, logp, mask, *, key):
        return logp * jax.random.uniform(key), jnp.zeros_like(mask)

    losses = [
        measure(passes, Objective("x", make_algorithm(clip=r)), "after", ())[0].loss
        for r in (rule, clip.none)
    ]
    plain = make_algorithm(clip=lambda r, a, logp, mask: (logp, jnp.zeros_like(mask)))
    whole = measure(passes, Objective("x", plain), "after", ())[0].loss
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), 8)
    np.testing.assert_allclose(losses[0], whole * float(jax.random.uniform(key)), rtol=1e-5)


# ------------------------------------------------------------------------------------- pieces


def test_bins_by_hand(recorded):
    rollout = recorded.answers.rollout
    lengths = np.array([1] * 4 + [2] * 6 + [5] * 3 + [6] * 3)
    rollout = replace(rollout, mask=np.arange(6) < lengths[:, None])
    bins = make_bins(replace(recorded, answers=replace(recorded.answers, rollout=rollout)))
    sizes = {(bin.kind, bin.name): int(bin.rows.sum()) for bin in bins}
    assert sizes == {
        ("outcome", "right"): 7,
        ("outcome", "wrong"): 9,  # the one that can't be scored included
        ("length", "1"): 4,
        ("length", "2"): 6,
        ("length", "5"): 3,
        ("length", "6"): 3,
        ("pass rate", "none"): 4,
        ("pass rate", "hard"): 4,  # 1 of 4
        ("pass rate", "medium"): 4,  # 2 of 4
        ("pass rate", "all"): 4,
    }
    longest = next(bin for bin in bins if bin.name == "6")
    assert longest.answers == 3 / 16 and longest.tokens == 18 / 49


def test_without_a_part_called_correct_there_are_only_lengths(recorded):
    rewards = recorded.answers.rewards
    rewards = replace(rewards, parts={"style": rewards.parts["style"]})
    bins = make_bins(replace(recorded, answers=replace(recorded.answers, rewards=rewards)))
    assert {bin.kind for bin in bins} == {"length"}
    assert sum(bin.answers for bin in bins) == 1


def test_shares_by_hand():
    first, rest = np.array([True, False, False]), np.array([False, True, True])
    bins = [Bin("k", "a", first, 0, 0), Bin("k", "b", rest, 0, 0)]
    cotangent = np.array([[1.0, -1.0], [0.0, 4.0], [-2.0, 0.0]], np.float32)
    assert gradient_shares(cotangent, bins) == (0.25, 0.75)
    assert np.isnan(gradient_shares(0 * cotangent, bins)).all()


def test_cosines_by_hand():
    trees = [{"a": [1.0, 0.0], "b": {"c": 0.0}}, {"a": [0.0, 1.0], "b": {"c": -1.0}}]
    trees += [{"a": [-3.0, 0.0], "b": {"c": 0.0}}, {"a": [1.0, 1.0], "b": {"c": 0.0}}]
    trees = jax.tree.map(np.float32, trees)
    half = np.sqrt(0.5)
    wanted = [[1, 0, -1, half], [0, 1, 0, 0.5], [-1, 0, 1, -half], [half, 0.5, -half, 1]]
    np.testing.assert_allclose(cosines(trees), wanted, atol=1e-7)


def test_what_was_not_recorded_is_refused_by_name(recorded, compiles):
    def remax(reward, length, *, greedy):
        return jnp.broadcast_to(greedy, reward.shape)

    def put(algorithm):
        objectives = [Objective("grpo", make_algorithm()), Objective("odd", algorithm)]
        return replay(recorded, objectives, bigram(), SETTINGS)

    compiles.clear()
    with pytest.raises(
        ReplayError, match=r"odd: its baseline needs .* greedy .* record a run with"
    ):
        put(make_algorithm(baseline=remax))
    with pytest.raises(ReplayError, match=r"odd: filter.on=exact is no .* \(correct, style\)"):
        put(make_algorithm(filter=replace(MIXED, on="exact")))
    assert compiles == []
    best = replace(recorded.answers, greedy=np.array([1, 0, 1, 0], np.float32))
    passes = Passes(replace(recorded, answers=best), bigram(), SETTINGS)
    batch = batch_for(passes, make_algorithm(baseline=remax, scale=scale.none))
    total = best.rewards.total
    wanted = np.nan_to_num(total - np.repeat(best.greedy, G))
    np.testing.assert_allclose(batch.advantage, wanted, atol=1e-6)


def test_the_loss_of_all_rows_needs_no_weights_of_its_own(passes):
    batch = batch_for(passes, make_algorithm())
    _, sums, cotangent = loss_and_cotangent(
        make_algorithm(), passes.stats("before"), batch, None, None
    )
    mask = np.asarray(batch.rollout.mask & batch.keep[:, None])
    assert float(sums["tokens"]) == mask.sum()
    assert (np.asarray(cotangent.logp)[~mask] == 0).all() and not np.asarray(
        cotangent.entropy
    ).any()
