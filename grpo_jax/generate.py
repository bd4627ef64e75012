"""Sampling completions: one jitted program does the prefill and the whole decode loop.

`JaxSampler` is the built-in `Sampler` (types.py); an external engine has the same two calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax import compiled, refill
from grpo_jax.kernels import sampling
from grpo_jax.kernels.matmul import matmul
from grpo_jax.models.llama import Model
from grpo_jax.refill import Job, anywhere
from grpo_jax.sharding import ONE_DEVICE, Placement
from grpo_jax.types import Params, Rollout, SamplingParams


@dataclass
class JaxSampler:
    """The built-in sampler. Compiles once for each (prompts, rows, SamplingParams).

    `prompt_slots`: S, the width that every prompt is left-padded to; a longer one is an error.
    `eos_ids`: tokens that end a completion (they stay in it). `pad_id` fills the rest.
    `slots`: rows that are decoded at a time (see `generate`); what is sampled is the same for any.
    `place`: rows, and the slots, are spread over its devices, each of which has all parameters for
    as long as it samples and decodes until its own rows have ended.
    """

    model: Model
    prompt_slots: int
    eos_ids: tuple[int, ...]
    pad_id: int
    slots: int | None = None
    jit: Callable = jax.jit
    place: Placement = ONE_DEVICE
    _params: Params | None = None
    _version: int = 0
    _programs: dict[SamplingParams, Callable] = field(default_factory=dict)

    def load(self, params: Params, version: int) -> None:
        self._params, self._version = params, version

    def close(self) -> None:
        """Let the weights go."""
        self._params = None

    def sample(self, prompts, row_ids, params, key) -> Rollout:
        if self._params is None:
            raise RuntimeError("sample() before load(): the sampler has no weights yet")
        ids, mask = pad_prompts(prompts, self.prompt_slots, self.pad_id)
        rows = np.asarray(row_ids, np.int32)
        program = self._programs.get(params)
        if program is None:
            rollout = partial(self._rollout, params)
            program = self.jit(rollout, compiler_options=compiled.quickly())
            self._programs[params] = program
        dealt = self.place.share(dealt_out(ids, mask, rows, self.place.shards))
        rollout = program(self._params, *dealt, self.place.share(key), np.int32(self._version))
        if len(rollout.mask) == len(rows):
            return rollout
        return jax.tree.map(lambda a: a[: len(rows)], rollout)  # without those that filled up

    def _rollout(self, sampling_params, params, ids, mask, row_ids, key, version) -> Rollout:
        def of_rows(params, key, ids, mask, row_ids):
            return generate(
                self.model,
                self.place.gather(params),
                ids,
                mask,
                row_ids,
                key,
                sampling_params=sampling_params,
                eos_ids=self.eos_ids,
                slots=None if self.slots is None else max(self.slots // self.place.shards, 1),
            )

        sampled = self.place.by_rows(of_rows, (params, key), (ids, mask, row_ids))
        tokens, logp, length, done = self.place.everywhere(sampled)
        valid = jnp.arange(sampling_params.max_tokens) < length[:, None]
        group = len(row_ids) // len(ids)
        return Rollout(
            prompt=jnp.repeat(ids, group, 0),
            prompt_mask=jnp.repeat(mask, group, 0),
            completion=jnp.where(valid, tokens, self.pad_id),
            mask=valid,
            sampler_logp=jnp.where(valid, logp, 0.0),
            truncated=~done,
            version=jnp.full(len(row_ids), version),
        )


def dealt_out(
    ids: Int[np.ndarray, "P S"],
    mask: Bool[np.ndarray, "P S"],
    row_ids: Int[np.ndarray, "B"],
    shards: int,
) -> tuple[Int[np.ndarray, "Q S"], Bool[np.ndarray, "Q S"], Int[np.ndarray, "C"]]:
    """With a number of prompts that `shards` divides, so that each has whole ones with their rows:
    a group is split where that is even (its prompt is then there twice), else the last prompt comes
    again, with rows that the caller drops."""
    prompts, group = len(ids), len(row_ids) // len(ids)
    times = shards // math.gcd(prompts, shards)
    if group % times == 0:
        return ids.repeat(times, 0), mask.repeat(times, 0), row_ids
    spare = -prompts % shards
    last = row_ids.reshape(prompts, group)[-1:].repeat(spare, 0).reshape(-1)
    ids, mask = (np.concatenate([a, a[-1:].repeat(spare, 0)]) for a in (ids, mask))
    return ids, mask, np.concatenate([row_ids, last])


def pad_prompts(
    prompts: Sequence[Sequence[int]], slots: int, pad_id: int
) -> tuple[Int[np.ndarray, "P S"], Bool[np.ndarray, "P S"]]:
    """Left-pad to `slots` tokens. ValueError for an empty prompt and for one that does not fit."""
    ids = np.full((len(prompts), slots), pad_id, np.int32)
    mask = np.zeros((len(prompts), slots), bool)
    for row, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= slots:
            raise ValueError(f"prompt {row} has {len(prompt)} tokens; it must have 1 to {slots}")
        ids[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = True
    return ids, mask


def given_rollout(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    prompt_slots: int,
    slots: int,
    pad_id: int,
) -> Rollout:
    """A rollout of completions that nobody sampled (demonstrations, right answers), to be scored.

    Numpy leaves; a completion is cut at `slots` tokens. sampler_logp is 0.
    """
    prompt, prompt_mask = pad_prompts(prompts, prompt_slots, pad_id)
    completion = np.full((len(completions), slots), pad_id, np.int32)
    mask = np.zeros(completion.shape, bool)
    for row, ids in enumerate(completions):
        ids = ids[:slots]
        completion[row, : len(ids)], mask[row, : len(ids)] = ids, True
    return Rollout(
        prompt=prompt,
        prompt_mask=prompt_mask,
        completion=completion,
        mask=mask,
        sampler_logp=np.zeros(mask.shape, np.float32),
        truncated=np.zeros(len(mask), bool),
        version=np.zeros(len(mask), np.int32),
    )


def generate(
    model: Model,
    params: Params,
    prompt: Int[Array, "P S"],
    prompt_mask: Bool[Array, "P S"],
    row_ids: Int[Array, "B"],
    key: Key[Array, ""],
    *,
    sampling_params: SamplingParams,
    eos_ids: tuple[int, ...],
    slots: int | None = None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B"], Bool[Array, "B"]]:
    """Sample B/P completions of each prompt -> tokens, their log-probs, lengths, ended by EOS.

    The prompt's forward pass and its keys and values are shared by the group. The loop stops when
    every row has ended. Token t of row i uses noise of (key, row_ids[i], t) alone, so neither the
    batch a row is in nor its place there changes what it samples. What lies past a row's length has
    no meaning. T = sampling_params.max_tokens.

    `slots`: rows that are decoded at a time, while others wait (refill.py); None: all of them.
    """
    hidden, cache = model.prefill(params, prompt, prompt_mask)
    job = Job(
        model=model,
        layers=model.unstack(params),
        draw=partial(_draw, sampling_params, model.head(params), key),
        hidden=hidden,
        cache=cache,
        mask=prompt_mask,
        row_ids=row_ids,
        ends=jnp.asarray(eos_ids, jnp.int32),
        budget=sampling_params.max_tokens,
    )
    if slots is None or slots >= len(row_ids):
        return _decode(job)
    tokens, logp, length, done, _ = refill.decode(job, slots)
    return tokens, logp, length, done


def _draw(sampling_params, head, key, hidden, row_ids, t):
    """Token t (one number, or one each) of rows with that last hidden state, and its log-prob."""
    logits = matmul(hidden, head, True)
    if sampling_params.temperature == 0:
        return sampling.greedy(logits)
    return sampling.sample(
        sampling.row_uniform(key, row_ids, t),
        logits,
        temperature=sampling_params.temperature,
        top_k=sampling_params.top_k,
        top_p=sampling_params.top_p,
    )


def _decode(job: Job):
    """All rows at a time, until the last one has ended."""
    (B,), T = job.row_ids.shape, job.budget
    start, columns = jnp.repeat(job.mask.sum(-1), job.group), jnp.arange(T)

    def body(carry):
        t, token, done, length, tokens, logps, cache = carry
        visible = (columns <= t)[None]
        hidden, cache = job.model.decode(
            job.layers, token, start + t, job.cache, job.mask, cache, t, visible
        )
        token, logp = job.draw(hidden, job.row_ids, t + 1)
        tokens, logps = tokens.at[t + 1].set(token), logps.at[t + 1].set(logp)
        length = length + ~done
        return t + 1, token, done | jnp.isin(token, job.ends), length, tokens, logps, cache

    token, logp = job.draw(jnp.repeat(job.hidden, job.group, 0), job.row_ids, 0)
    tokens = jnp.zeros((T, B), jnp.int32).at[0].set(token)
    logps = jnp.zeros((T, B), jnp.float32).at[0].set(logp)
    carry = (jnp.int32(0), token, jnp.isin(token, job.ends), jnp.ones(B, jnp.int32), tokens, logps)
    carry = lax.while_loop(
        lambda c: (c[0] < T - 1) & anywhere(~c[2].all()),
        body,
        (*carry, job.model.empty_cache(B, T)),
    )
    _, _, done, length, tokens, logps, _ = carry
    return tokens.T, logps.T, length, done
