"""rollout.length_buckets: without the padding behind its longest answer, a batch is the same."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.announce import announce
from grpo_jax.answers import RolloutSettings
from grpo_jax.check import ConfigError
from grpo_jax.config import CONF, load_algorithm
from grpo_jax.learner import make_update
from grpo_jax.policy import PolicySettings, make_logprobs
from tests.cases import make_algorithm
from tests.composed import run_of
from tests.fixtures import VOCAB, assert_trees_equal, bigram, make_batch, make_state
from tests.pipeline import follow, problem
from tests.test_rollout import MIXED, RIGHT, collector
from tests.test_rollout_axes import KEEP, step

PRESETS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
WIDTH, PADDING = 12, 20


@pytest.mark.parametrize(
    ("budget", "count", "widths"),
    [
        (768, 4, (192, 384, 576, 768)),
        (48, 4, (16, 24, 40, 48)),  # rounded up to eights
        (8, 4, (8,)),
        (20, 3, (8, 16, 20)),  # the last is the budget itself
        (100, 1, (100,)),
    ],
)
def test_widths_are_equal_steps_up_to_the_budget(budget, count, widths):
    settings = RolloutSettings(2, 2, 8, budget, 1.0, 1.0, 0, length_buckets=count)
    assert settings.widths == widths


def test_at_least_one():
    with pytest.raises(ConfigError, match=r"rollout\.length_buckets=0: at least 1"):
        run_of("rollout.length_buckets=0")


def test_buckets_of_a_budget_that_has_one_width_are_announced():
    short = "rollout.max_completion_length=8"
    silent = announce(run_of(short)), announce(run_of("rollout.length_buckets=2"))
    (line,) = set(announce(run_of(short, "rollout.length_buckets=2"))) - {*silent[0], *silent[1]}
    assert "rollout.length_buckets=2: widths are multiples of 8" in line
    assert not any("length_buckets" in line for line in (*silent[0], *silent[1]))


# ------------------------------------------------------------------------------ loss, gradient


@cache
def narrow_and_wide():
    """One problem, and the same with padding that holds rubbish."""
    narrow = problem(group=6, width=WIDTH)

    def pad(leaf, value=np.nan):
        return np.pad(np.asarray(leaf), ((0, 0), (0, PADDING)), constant_values=value)

    rollout = narrow.answers.rollout
    rollout = replace(
        rollout,
        completion=pad(rollout.completion, 7),
        mask=pad(rollout.mask, False),
        sampler_logp=pad(rollout.sampler_logp),
    )
    tokens = ("logp", "old_logp", "ref_logp", "entropy", "exact_kl")
    wide = replace(
        narrow,
        answers=replace(narrow.answers, rollout=rollout),
        **{name: jnp.asarray(pad(getattr(narrow, name))) for name in tokens},
    )
    return narrow, wide


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_the_same_loss_and_gradient(preset):
    algorithm = load_algorithm(preset, f"rollout.max_completion_length={WIDTH}")
    narrow, wide = (follow(algorithm, data) for data in narrow_and_wide())
    assert narrow["loss"] != 0 and np.abs(narrow["d_logp"]).sum() > 0
    for name, value in narrow.items():
        other = wide[name]
        if other.ndim == 2 and other.shape[1] == WIDTH + PADDING:
            assert not other[:, WIDTH:].any()
            other = other[:, :WIDTH]
        largest = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(other, value, rtol=0, atol=1e-6 * largest, err_msg=name)


def test_an_update_is_the_same():
    model, algorithm = bigram(), load_algorithm("grpo", "kl.coef=0.5")
    update = make_update(algorithm, model, optax.sgd(1.0), PolicySettings(0.7, 4, 64), group=1)
    params, rows, found = model.init(jax.random.key(3)), jnp.arange(8), []
    narrow = make_batch()
    pad = ((0, 0), (0, PADDING))
    rollout = replace(
        narrow.rollout,
        completion=jnp.pad(narrow.rollout.completion, pad),
        mask=jnp.pad(narrow.rollout.mask, pad),
        sampler_logp=jnp.pad(narrow.rollout.sampler_logp, pad),
    )
    logps = {n: jnp.pad(getattr(narrow, n), pad) for n in ("old_logp", "ref_logp")}
    for batch in (narrow, replace(narrow, rollout=rollout, **logps)):
        state, metrics = update(make_state(params, optax.sgd(1.0)), batch, rows)
        found.append((state.trainable, metrics))
    assert_trees_equal(*found, rtol=1e-5, atol=1e-5)  # without AVX-512, 4e-6 is seen
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, found[0][0])
    assert moved["head"]["embedding"] > 0.01


# --------------------------------------------------------------------------------- collecting


def bucketed(*calls, count=4, **axes):
    """A collector with a budget of 32 tokens; with 4 buckets the widths are 8, 16, 24 and 32."""
    made = collector(*calls, **axes)
    made.settings = replace(made.settings, max_completion_length=32, length_buckets=count)
    made.sampler.slots = 32
    return made


def width(data):
    (found,) = {
        leaf.shape[1]
        for rollout in (data.batch.rollout, data.answers.rollout)
        for leaf in (rollout.completion, rollout.mask, rollout.sampler_logp)
    } | {data.batch.old_logp.shape[1]}
    return found


@pytest.mark.parametrize("length", [1, 7, 8, 15, 24, 31])
def test_a_batch_is_as_wide_as_its_longest_answer_needs(length):
    texts = ["1", "2", "1", "3" * length]  # and EOS
    made, whole = bucketed(texts), bucketed(texts, count=1)
    narrow, wide = step(made, 1, 0), step(whole, 1, 0)
    assert width(narrow) == -(-(length + 1) // 8) * 8 and width(wide) == 32
    assert narrow.metrics == wide.metrics
    np.testing.assert_array_equal(narrow.batch.advantage, wide.batch.advantage)
    np.testing.assert_array_equal(narrow.answers.lengths, wide.answers.lengths)
    cut = narrow.batch.rollout.completion
    np.testing.assert_array_equal(cut, wide.batch.rollout.completion[:, : cut.shape[1]])
    assert narrow.answers.texts == tuple(texts)


def test_an_answer_that_was_cut_off_has_the_whole_budget():
    data = step(bucketed(["1", "2", "1", "3" * 32 + "~"]), 1, 0)
    assert width(data) == 32 and data.batch.rollout.truncated.tolist() == [False] * 3 + [True]


def test_what_comes_after_a_stop_string_takes_no_room():
    made = bucketed(["1", "2", "1ab" + "3" * 28, "1"])
    made.task = replace(made.task, stop_strings=("ab",))
    data = step(made, 1, 0)
    assert data.answers.texts[2] == "1" and width(data) == 8


LONG = ["1", "3" * 19]  # a mixed group of up to 20 tokens
ROUNDS = [[*MIXED, "1" * 30, "1" * 30], [*MIXED, *LONG], [*RIGHT, *MIXED]]


def test_rounds_and_steps_of_different_lengths_come_together():
    made, whole = bucketed(*ROUNDS, filter=KEEP), bucketed(*ROUNDS, count=1, filter=KEEP)
    first, _ = step(made, 1, 0), step(whole, 1, 0)
    assert width(first) == 8  # the long groups were dropped, or wait
    assert [p.text for p in first.answers.prompts] == ["0:", "2:"]
    assert made.waiting() == whole.waiting() is not None
    saved = json.loads(json.dumps(made.waiting()))
    position = first.position
    again = bucketed(ROUNDS[2], filter=KEEP)
    again.restore(saved)
    results = [step(each, 2, position) for each in (made, whole, again)]
    assert [width(data) for data in results] == [24, 32, 24]
    assert results[0].answers.texts == results[1].answers.texts
    assert results[0].metrics == results[1].metrics
    assert_trees_equal(results[0].batch, results[2].batch)
    assert list(results[0].batch.rollout.version) == [1, 1, 2, 2]


# ------------------------------------------------------------------------------- compilation


def test_each_width_compiles_once(compiles):
    """Case M2: verl#7272, pytorch/torchtitan#2823, vllm#16726 (a compile a length)."""
    model, algorithm, settings = bigram(), make_algorithm(), PolicySettings(1.0, 4, 32)
    lengths = [6, 20, 30, 3, 17, 28, 22, 7, 31]  # of the widths 8, 24, 32, 8, 24, 32, ...
    made = bucketed(*(["1", "2", "1", "3" * (length - 1)] for length in lengths))
    made.logprobs = make_logprobs(model, settings)
    update = make_update(algorithm, model, optax.sgd(0.1), settings, made.settings.group_size)
    params = model.init(jax.random.key(0))
    assert made.tokenizer.pad_id < VOCAB
    state, rows, position, widths = make_state(params, optax.sgd(0.1)), jnp.arange(4), 0, []
    for number in range(1, len(lengths) + 1):
        if number == 4:  # every width has come
            new = [name for name in compiles if "logprobs" in name or "update" in name]
            assert sorted(new) == ["jit(logprobs)"] * 3 + ["jit(update)"] * 3
            compiles.clear()
        made.sampler.load(state.trainable, number)
        data = made.collect(state.trainable, None, number, position, jax.random.key(number))
        position = data.position
        widths.append(width(data))
        state, _ = update(state, data.batch, rows)
    assert widths == [8, 24, 32] * 2 + [24, 8, 32]
    assert compiles == []
