"""generate.py: what is sampled, its log-probs, where a row ends, and what its noise depends on."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.generate import JaxSampler, generate, given_rollout, pad_prompts
from grpo_jax.kernels.masked import completion_mask
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.policy import PolicySettings, make_logprobs
from grpo_jax.types import SamplingParams
from tests.fixtures import PROMPTS, SLOTS, TOKENS, VOCAB, small_llama

ENDS = (3, 7, 19, 25, 31)
KEY = jax.random.key(8)
COOL = SamplingParams(TOKENS, temperature=0.7)


@cache
def sampler(eos_ids=ENDS, slots=SLOTS, pad_id=0):
    model, params = small_llama()
    made = JaxSampler(model, slots, eos_ids, pad_id)
    made.load(params, 5)
    return made


def sample(prompts=PROMPTS, rows=None, key=KEY, params=COOL, **which):
    rows = np.arange(2 * len(prompts)) if rows is None else np.asarray(rows)
    return jax.tree.map(np.asarray, sampler(**which).sample(prompts, rows, params, key))


@cache
def logprobs(temperature):
    model, _ = small_llama()
    return make_logprobs(model, PolicySettings(temperature, micro_batch_rows=4, vocab_chunk=16))


def recomputed(rollout, temperature):
    _, params = small_llama()
    return np.asarray(logprobs(temperature)(params, rollout)[0])


def own_tokens(rollout):
    return [ids[keep].tolist() for ids, keep in zip(rollout.completion, rollout.mask, strict=True)]


def first_end(completion):
    return np.asarray(completion_mask(jnp.asarray(completion), ENDS))


def test_logprobs_are_those_of_the_trainer():
    rollout = sample()
    lengths = rollout.mask.sum(-1)
    assert len(set(lengths.tolist())) > 2 and lengths.max() > 4
    gap = abs(recomputed(rollout, 0.7) - rollout.sampler_logp)
    assert gap[rollout.mask].max() < 1e-5
    # and no other temperature's: the ratio would not start at 1
    assert abs(recomputed(rollout, 1.0) - rollout.sampler_logp)[rollout.mask].mean() > 0.05


def test_truncated_support_renormalises_the_samplers_logprobs_only():
    rollout = sample(params=SamplingParams(TOKENS, temperature=0.7, top_k=3))
    excess = (rollout.sampler_logp - recomputed(rollout, 0.7))[rollout.mask]
    assert (excess > 0.01).all()  # log(1 / kept mass): why training with it is announced


def test_fields_of_a_rollout():
    rollout = sample()
    ids, mask = pad_prompts(PROMPTS, SLOTS, 0)
    np.testing.assert_array_equal(rollout.prompt, ids.repeat(2, 0))
    np.testing.assert_array_equal(rollout.prompt_mask, mask.repeat(2, 0))
    assert rollout.version.tolist() == [5] * 8
    np.testing.assert_array_equal(rollout.mask, first_end(rollout.completion))
    ended = np.isin(rollout.completion, ENDS).any(1)
    np.testing.assert_array_equal(rollout.truncated, ~ended)
    assert ended.any() and not ended.all()
    assert (rollout.completion[~rollout.mask] == 0).all()  # the pad
    assert (rollout.sampler_logp[~rollout.mask] == 0).all()


def test_prompts_are_padded_on_the_left():
    ids, mask = pad_prompts([[5, 6], [7, 8, 9]], 4, 1)
    assert ids.tolist() == [[1, 1, 5, 6], [1, 7, 8, 9]]
    assert mask.tolist() == [[False, False, True, True], [False, True, True, True]]


def test_given_completions_are_cut_and_padded_on_the_right():
    rollout = given_rollout([[5], [6]], [[1, 2, 3, 4], [9]], 2, 3, 0)
    assert rollout.prompt.tolist() == [[0, 5], [0, 6]]
    assert rollout.completion.tolist() == [[1, 2, 3], [9, 0, 0]]
    assert rollout.mask.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("prompts", [[[]], [[1] * (SLOTS + 1)]])
def test_a_prompt_that_does_not_fit_is_refused(prompts):
    with pytest.raises(ValueError, match=f"prompt 0 has .* tokens; it must have 1 to {SLOTS}"):
        sample(prompts)


def test_sampling_without_weights_is_refused():
    with pytest.raises(RuntimeError, match="before load"):
        JaxSampler(small_llama()[0], SLOTS, ENDS, 0).sample([[1]], np.arange(1), COOL, KEY)


# ---------------------------------------------------------------------------------------- noise


def test_a_row_is_the_same_in_any_batch():
    whole = sample()
    parts = {
        "half": (PROMPTS[2:], [4, 5, 6, 7]),
        "groups of four": (PROMPTS[1:2], [2, 3, 2, 3]),
        "another order": (PROMPTS[::-1], [6, 7, 4, 5, 2, 3, 0, 1]),
    }
    for prompts, rows in parts.values():
        part = sample(prompts, rows)
        np.testing.assert_array_equal(part.completion, whole.completion[rows])
        np.testing.assert_allclose(part.sampler_logp, whole.sampler_logp[rows], atol=1e-5)


def test_rows_and_keys_have_noise_of_their_own():
    rollout = sample([PROMPTS[0]] * 4)
    assert len({tuple(ids) for ids in rollout.completion.tolist()}) > 6  # two short ones may agree
    later = sample([PROMPTS[0]] * 4, key=jax.random.fold_in(KEY, 1))
    assert (rollout.completion != later.completion).any(1).all()
    again = sample([PROMPTS[0]] * 4)
    np.testing.assert_array_equal(rollout.completion, again.completion)


def test_tokens_of_a_row_have_noise_of_their_own():
    # uniform logits: were the noise that of the row alone, every token would be the same
    flat = replace(sampler(eos_ids=(VOCAB,)))
    flat.load(jax.tree.map(jnp.zeros_like, small_llama()[1]), 0)
    rollout = flat.sample(PROMPTS, np.arange(8), COOL, KEY)
    assert min(len(set(ids)) for ids in np.asarray(rollout.completion).tolist()) > 4
    np.testing.assert_allclose(rollout.sampler_logp, -np.log(VOCAB), rtol=1e-5)


def test_more_padding_changes_nothing():
    rollout, wider = sample(), sample(slots=SLOTS + 3)
    np.testing.assert_array_equal(rollout.completion, wider.completion)
    np.testing.assert_allclose(rollout.sampler_logp, wider.sampler_logp, atol=1e-5)


# ------------------------------------------------------------------------------------- greedy


def test_greedy_is_the_argmax_of_the_full_forward():
    model, params = small_llama()
    rollout = sample(params=SamplingParams(TOKENS, temperature=0.0))
    tokens = jnp.concatenate([rollout.prompt, rollout.completion], 1)
    mask = jnp.concatenate([rollout.prompt_mask, rollout.mask], 1)
    hidden = jax.jit(model.hidden)(params, tokens, mask)[:, SLOTS - 1 : -1]
    best = np.asarray((hidden @ model.head(params).T).argmax(-1))
    assert (best == rollout.completion)[rollout.mask].all()
    assert (rollout.sampler_logp == 0).all()
    np.testing.assert_array_equal(rollout.completion[::2], rollout.completion[1::2])


# ---------------------------------------------------------------------------------- where rows end


def test_ending_early_cuts_and_changes_nothing_else():
    free, ended = sample(eos_ids=(VOCAB,)), sample()
    assert free.mask.all() and free.truncated.all()  # no such token: every row runs on
    mask = first_end(free.completion)
    np.testing.assert_array_equal(ended.mask, mask)
    np.testing.assert_array_equal(ended.completion, np.where(mask, free.completion, 0))
    np.testing.assert_allclose(ended.sampler_logp, np.where(mask, free.sampler_logp, 0), atol=1e-5)


def test_any_of_several_tokens_ends_a_row():
    rollout = sample()
    rows = zip(own_tokens(rollout), rollout.truncated, strict=True)
    last = {ids[-1] for ids, truncated in rows if not truncated}
    assert len(last) > 1 and last <= set(ENDS)


def test_the_pad_may_be_an_end():
    rollout, other = sample(pad_id=ENDS[0]), sample()
    np.testing.assert_array_equal(rollout.mask, other.mask)
    np.testing.assert_array_equal(rollout.truncated, other.truncated)
    assert own_tokens(rollout) == own_tokens(other)
    assert (rollout.completion[~rollout.mask] == ENDS[0]).all()


def test_the_loop_stops_with_the_last_row():
    model, params = small_llama()
    ids, mask = pad_prompts(PROMPTS, SLOTS, 0)
    many = tuple(range(VOCAB // 2))  # half of all tokens end a row
    program = jax.jit(partial(generate, model, sampling_params=SamplingParams(60), eos_ids=many))
    tokens, logp, length, done = program(params, ids, mask, jnp.arange(8), KEY)
    longest = int(length.max())
    assert done.all() and 2 < longest < 30
    assert (tokens[:, longest:] == 0).all() and (logp[:, longest:] == 0).all()  # never written
    assert (logp[:, :longest] < 0).all()  # rows that had ended ran on until then


def test_a_budget_of_one_token():
    rollout = sample(params=SamplingParams(1, temperature=0.7))
    np.testing.assert_array_equal(rollout.completion, sample().completion[:, :1])
    assert rollout.mask.all()
    np.testing.assert_array_equal(rollout.truncated, ~np.isin(rollout.completion[:, 0], ENDS))


# ------------------------------------------------------------------------------------------ memory


def test_a_group_shares_its_prompts_cache():
    config = LlamaConfig(16, 64, 1, 2, 2, 32, 16)
    slots, group, prompts = 64, 64, 2
    copy = 2 * prompts * config.num_kv_heads * slots * config.head_dim * 4  # bytes
    model = llama.build(config)
    shape = jax.ShapeDtypeStruct
    program = partial(generate, model, sampling_params=SamplingParams(2), eos_ids=(1,))
    compiled = jax.jit(program).lower(
        jax.eval_shape(model.init, KEY),
        shape((prompts, slots), jnp.int32),
        shape((prompts, slots), jnp.bool),
        shape((prompts * group,), jnp.int32),
        shape((), KEY.dtype),
    )
    memory = compiled.compile().memory_analysis().temp_size_in_bytes
    assert memory < group / 2 * copy


def test_a_sampler_is_loaded_anew():
    once = replace(sampler())
    once.load(jax.tree.map(jnp.zeros_like, small_llama()[1]), 8)
    rollout = once.sample(PROMPTS, np.arange(8), COOL, KEY)
    assert set(np.asarray(rollout.version).tolist()) == {8}
    assert (np.asarray(rollout.completion) != sample().completion).any()
