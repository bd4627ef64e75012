"""rollout.py: which comes first, the passes through the model or the rewards, and that it can't
matter."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from grpo_jax.answers import RolloutSettings
from grpo_jax.generate import JaxSampler
from grpo_jax.kernels import baseline, filter, kl, scale
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.passes import start_passes
from grpo_jax.policy import PolicySettings, make_exact_kl, make_logprobs
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rollout import Collector
from grpo_jax.types import Filter, Kl
from tests.cases import make_algorithm
from tests.fixtures import (
    assert_trees_equal,
    characters,
    constant_exact_kl,
    constant_logprobs,
    correct,
    make_batch,
    make_task,
)
from tests.test_rollout import KEY, MIXED, NOW, REFERENCE, RIGHT, collector

pytestmark = pytest.mark.core

KEEP_ALL = Filter(filter.none, None, 1, "partial")
MASK = Filter(filter.mixed, "correct", 1, "partial")  # dropped groups are masked, not replaced
SEARCH = Filter(filter.mixed, "correct", 3, "partial", "keep")
PENALTY = Kl(kl.k3, 0.1, "loss")


def watched(*calls, overlap, **axes):
    """A collector whose passes, samples and rewards leave a note in the list that is returned."""
    events = []

    def logprobs(params, rollout, group):
        events.append("policy" if params is NOW else "reference")
        return constant_logprobs(params, rollout, group)

    def reward(completion, answer):
        events.append("reward")
        return correct(completion, answer)

    made = collector(*calls, parts=[RewardPart("correct", reward)], **axes)
    sample = made.sampler.sample
    made.sampler.sample = lambda *given: events.append("sample") or sample(*given)
    made.settings = replace(made.settings, overlap=overlap)
    made.logprobs = logprobs
    return made, events


def order(made, events, step=1):
    events.clear()
    made.sampler.load(NOW, step)
    made.collect(NOW, REFERENCE, step, 0, KEY)
    return [e for e, last in zip(events, [None, *events], strict=False) if e != last]


PASSES, REWARDS = ["policy", "reference"], ["reward"]


@pytest.mark.parametrize("rule", [KEEP_ALL, MASK])
def test_passes_are_started_before_the_rewards(rule):
    made, events = watched(MIXED + RIGHT, overlap=True, filter=rule, kl=PENALTY)
    assert order(made, events) == ["sample", *PASSES, *REWARDS]
    made, events = watched(MIXED + RIGHT, overlap=False, filter=rule, kl=PENALTY)
    assert order(made, events) == ["sample", *REWARDS, *PASSES]


def test_nobody_waits_for_a_pass_or_looks_at_it():
    computing = [(object(), object()) for _ in PASSES]
    rollout = jax.tree.map(np.asarray, make_batch().rollout)
    passes = iter(computing)
    results = start_passes(
        PENALTY, lambda *_: next(passes), constant_exact_kl, NOW, REFERENCE, rollout, 2
    )
    assert (results.logp, results.entropy) == computing[0] and results.ref_logp is computing[1][0]
    assert results.take(np.arange(4), 2) is results  # where every group stays in its place


def test_a_greedy_answer_is_asked_for_before_anything_is_scored():
    rules = {"baseline": baseline.greedy, "scale": scale.none}
    made, events = watched(MIXED + RIGHT, ["1", "2"], overlap=True, **rules)
    assert order(made, events) == ["sample", "policy", "reward"]
    assert events.count("sample") == 2 and events[:2] == ["sample", "sample"]


def test_nothing_is_computed_for_a_group_that_may_be_replaced():
    rounds = MIXED + RIGHT, RIGHT + MIXED
    made, events = watched(*rounds, overlap=True, filter=SEARCH, kl=PENALTY)
    first = order(made, events)
    assert first == ["sample", *REWARDS, "sample", *REWARDS, *PASSES]
    assert events.count("policy") == events.count("reference") == 1


def test_a_group_that_waited_is_in_the_batch_so_the_choice_comes_first():
    alone = Filter(filter.mixed, "correct", 1, "skip", "keep")
    made, events = watched(MIXED + RIGHT, overlap=True, filter=alone)
    assert order(made, events) == ["sample", "policy", "reward"]
    assert made.surplus is not None
    assert order(made, events, 2) == ["sample", "reward", "policy"]


@cache
def policy():
    """(sampler, the parameters of policy and reference, passes) of a small model."""
    words = characters()
    model = llama.build(LlamaConfig(words.vocab_size, 16, 1, 2, 2, 8, 16))
    programs, init = PolicySettings(1.0, 4, 32), jax.jit(model.init)
    return (
        JaxSampler(model, 4, words.eos_ids, words.pad_id),
        (init(jax.random.key(0)), init(jax.random.key(1))),
        (make_logprobs(model, programs), make_exact_kl(model, programs)),
    )


def by_digits(completion, answer):
    """Some groups are all right or all wrong, and others mixed."""
    return float(sum(c.isdigit() for c in completion) > 1)


@pytest.mark.parametrize(
    "axes",
    [
        {"kl": PENALTY},
        {"kl": Kl(kl.exact, 0.1, "reward")},
        {"kl": PENALTY, "filter": MASK},
        {"baseline": baseline.greedy, "scale": scale.none},
    ],
    ids=["loss", "reward", "masked", "greedy"],
)
def test_a_batch_is_the_same_bit_for_bit(axes):
    sampler, (params, reference), (logprobs, exact_kl) = policy()
    sampler.load(params, 1)
    found = []
    for overlap in (True, False):
        made = Collector(
            algorithm=make_algorithm(**axes),
            task=make_task(stop_strings=("ab", "7")),
            tokenizer=characters(),
            sampler=sampler,
            parts=[RewardPart("correct", by_digits)],
            settings=RolloutSettings(6, 2, 4, 12, 1.0, 1.0, 0, overlap=overlap, length_buckets=2),
            logprobs=logprobs,
            exact_kl=exact_kl,
            seed=0,
        )
        found.append(made.collect(params, reference, 1, 0, KEY))
    one, other = found
    assert_trees_equal(one.batch, other.batch)
    assert_trees_equal(one.answers.rollout, other.answers.rollout)
    assert one.metrics == other.metrics and one.answers.texts == other.answers.texts
    order = [prompt.text for prompt in one.answers.prompts]
    assert order == [prompt.text for prompt in other.answers.prompts]
    if "filter" in axes:  # not in the order in which they were sampled
        assert order != sorted(order) and not one.batch.keep.all()
    assert np.abs(one.batch.advantage).sum() > 1
