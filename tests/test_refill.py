"""refill.py: the same rows come out of any number of slots, in as many steps as a queue takes."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import refill
from grpo_jax.announce import announce
from grpo_jax.assemble import assemble
from grpo_jax.benchmark.sampling import Bench, BenchmarkSettings
from grpo_jax.check import ConfigError
from grpo_jax.generate import JaxSampler, generate
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.types import SamplingParams
from tests.composed import run_of
from tests.fixtures import (
    CORRECT,
    PROMPTS,
    SLOTS,
    TOKENS,
    VOCAB,
    bigram,
    characters,
    make_task,
    small_llama,
    table,
)

ENDS = (3, 7, 19, 25, 31)
KEY = jax.random.key(8)
COOL = SamplingParams(TOKENS, temperature=0.7)


@cache
def deep_llama():
    """More layers than decode unrolls: its caches are stacked."""
    model = llama.build(LlamaConfig(VOCAB, 8, 9, 2, 1, 4, 8))
    return model, jax.jit(model.init)(jax.random.key(1))


@cache
def pairs():
    return bigram(), table(jax.random.normal(jax.random.key(2), (VOCAB, VOCAB)))


@cache
def sampler(kind, slots, ends=ENDS):
    model, params = kind()
    made = JaxSampler(model, SLOTS, ends, 0, slots)
    made.load(params, 5)
    return made


def sample(kind, slots, rows, params=COOL, prompts=PROMPTS, **which):
    rollout = sampler(kind, slots, **which).sample(prompts, np.asarray(rows), params, KEY)
    return jax.tree.map(np.asarray, rollout)


def assert_same(rollout, other):
    for name in ("prompt", "prompt_mask", "completion", "mask", "truncated", "version"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(other, name), err_msg=name)
    np.testing.assert_allclose(rollout.sampler_logp, other.sampler_logp, atol=1e-5)


# ------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize(
    ("slots", "rows", "params"),
    [
        (1, 8, COOL),
        (3, 8, COOL),  # no divisor of the rows
        (9, 40, COOL),
        (3, 4, COOL),  # groups of one
        (3, 8, COOL._replace(temperature=0.0)),
        (3, 8, COOL._replace(top_k=3)),
        (3, 8, COOL._replace(top_p=0.8)),
        (3, 8, COOL._replace(max_tokens=1)),
        (3, 8, COOL._replace(max_tokens=2)),
    ],
)
def test_any_number_of_slots_samples_the_same(slots, rows, params):
    whole = sample(pairs, None, np.arange(rows), params)
    assert_same(sample(pairs, slots, np.arange(rows), params), whole)
    if params == COOL and rows > 4:
        assert whole.truncated.any() and not whole.truncated.all()
        assert len(set(whole.mask.sum(-1).tolist())) > 3


@pytest.mark.parametrize("kind", [small_llama, deep_llama])
def test_a_slot_reads_its_rows_prompt_and_its_own_tokens_alone(kind):
    """Keys and values: of prompts of four lengths, and of a ring that every slot fills anew."""
    params = COOL._replace(max_tokens=6)
    whole = sample(kind, None, np.arange(16), params)
    lengths = whole.mask.sum(-1)
    assert lengths.sum() > 3 * 3 * 6  # each of the slots goes round at least three times
    assert min(lengths) < 3 and (lengths == 6).any()
    assert_same(sample(kind, 3, np.arange(16), params), whole)


def test_the_slot_that_a_row_runs_in_does_not_matter():
    whole = sample(small_llama, 3, np.arange(16), COOL._replace(max_tokens=6))
    order = np.arange(16).reshape(4, 4)[::-1, [2, 0, 3, 1]].reshape(-1)
    other = sample(small_llama, 3, order, COOL._replace(max_tokens=6), PROMPTS[::-1])
    for a, b in ((whole.completion, other.completion), (whole.mask, other.mask)):
        np.testing.assert_array_equal(a[order], b)
    np.testing.assert_allclose(whole.sampler_logp[order], other.sampler_logp, atol=1e-5)


def test_rows_that_never_end_run_to_the_budget():
    whole = sample(pairs, None, np.arange(8), ends=(VOCAB,))
    assert whole.mask.all() and whole.truncated.all()
    assert_same(sample(pairs, 3, np.arange(8), ends=(VOCAB,)), whole)


# ------------------------------------------------------------------------------------ the steps


@cache
def script(rows, slots, budget):
    """A program that draws what it is told: row i ends with token lengths[i]."""
    model, params = pairs()

    def program(lengths, row_ids):
        def draw(hidden, ids, t):
            return jnp.where(t == lengths[ids] - 1, 1, 2), -(100.0 * ids + t)

        job = refill.Job(
            model=model,
            layers=params,
            draw=draw,
            hidden=jnp.zeros((rows, VOCAB)),
            cache=(),
            mask=jnp.ones((rows, 1), bool),
            row_ids=row_ids,
            ends=jnp.array([1]),
            budget=budget,
        )
        return refill.decode(job, slots)

    return jax.jit(program)


def scripted(lengths, slots, budget=40):
    """(tokens, log-probs, lengths, ended) and the steps."""
    program = script(len(lengths), slots, budget)
    *rest, steps = program(jnp.array(lengths), jnp.arange(len(lengths)))
    return jax.tree.map(np.asarray, rest), int(steps)


def queue(lengths, slots):
    """Steps of a queue that is served by hand."""
    waiting, left, steps = list(lengths), [0] * slots, 0
    while waiting or any(left):
        free = [i for i, tokens in enumerate(left) if not tokens]
        if len(free) >= min(max(slots // refill.SHARE, 1), len(waiting)):
            for i in free[: len(waiting)]:
                left[i] = waiting.pop(0)
        left = [max(tokens - 1, 0) for tokens in left]
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("lengths", "slots", "steps"),
    [
        ([3, 1, 1, 1], 2, 3),  # one slot has the long row, the other one all else
        ([4, 1, 1, 1, 1, 4], 2, 8),  # a long row that waited
        ([5] * 6, 2, 15),
        ([2, 3, 1], 1, 6),
        ([1] + [5] * 15 + [3], 16, 5),  # the last row does not wait for a second free slot,
        ([1] + [5] * 15 + [3, 3], 16, 8),  # the last but one does
        ([32] + [2] * 63, 8, 32),  # all 64 rows at once take 32 steps as well, of 64 rows each
    ],
)
def test_steps_are_those_of_a_queue(lengths, slots, steps):
    assert queue(lengths, slots) == steps
    assert scripted(lengths, slots)[1] == steps


@pytest.mark.parametrize("slots", [2, 16, 24])
def test_steps_of_a_long_tail_are_those_of_a_queue(slots):
    for seed in range(3):
        drawn = np.random.default_rng(seed).geometric(0.2, 60).clip(max=40)
        (tokens, logp, lengths, ended), steps = scripted(drawn.tolist(), slots)
        assert steps == queue(drawn.tolist(), slots)
        np.testing.assert_array_equal(lengths, drawn)
        assert ended.all()
        t = np.arange(40)
        last, inside = t == drawn[:, None] - 1, t < drawn[:, None]
        np.testing.assert_array_equal(tokens, np.where(last, 1, np.where(inside, 2, 0)))
        expected = -(100.0 * np.arange(60)[:, None] + t)
        np.testing.assert_array_equal(logp, np.where(inside, expected, 0))


# ------------------------------------------------------------------------------------- memory


@cache
def temporary(slots):
    model = llama.build(LlamaConfig(16, 16, 2, 2, 2, 16, 16))
    shape = jax.ShapeDtypeStruct
    how = {"sampling_params": SamplingParams(512), "eos_ids": (1,), "slots": slots}
    lowered = jax.jit(partial(generate, model, **how)).lower(
        jax.eval_shape(model.init, KEY),
        shape((4, 8), jnp.int32),
        shape((4, 8), jnp.bool),
        shape((64,), jnp.int32),
        shape((), KEY.dtype),
    )
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes


def test_memory_is_that_of_the_slots():
    def cache_of(rows):
        return 2 * 2 * rows * 2 * 16 * 512 * 4  # layers, k and v, rows, heads, h, T, bytes

    assert temporary(None) > cache_of(64)
    assert cache_of(8) < temporary(8) < cache_of(8) + cache_of(64) / 8  # and no second copy


# ------------------------------------------------------------------------------------ the knob


def test_training_and_its_evaluations_sample_in_slots():
    work = assemble(run_of("warmstart=none", "eval.forced_prefix=a", "rollout.slots=3"))
    probe = work.evaluator.probe_sampler
    assert probe is not None and work.sampler.slots == probe.slots == 3


def test_a_benchmark_samples_in_slots():
    settings = BenchmarkSettings(
        samples=3,
        greedy=False,
        pass_k=(1,),
        max_prompt_length=None,
        max_completion_length=6,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        batch_rows=64,
        seed=0,
    )
    logits = jax.random.normal(jax.random.key(3), (83, 83))
    made = Bench(bigram(), table(logits), characters(), [CORRECT], settings)
    in_slots = replace(made, settings=replace(settings, slots=4), _samplers={})
    plain, other = (next(b.run("stub", make_task()))["rows"] for b in (made, in_slots))
    assert plain == other and len(plain) == 15
    assert {s.slots for s in in_slots._samplers.values()} == {4}


def test_no_slot_is_refused_and_too_many_are_announced():
    with pytest.raises(ConfigError, match=r"rollout\.slots=0: at least 1"):
        run_of("rollout.slots=0")
    with pytest.raises(ConfigError, match=r"rollout\.slots=0\.5 should be a whole number or null"):
        run_of("rollout.slots=0.5")
    silent = announce(run_of("rollout.slots=127"))
    assert silent == announce(run_of())
    (line,) = set(announce(run_of("rollout.slots=128"))) - set(silent)
    assert "all 128 rows fit at once" in line
