"""The parts of a training step as calls to time: the project's own programs, on random weights.

Everything that knows how sampler, log-prob pass and update are called is in `Programs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from grpo_jax.generate import JaxSampler, given_rollout
from grpo_jax.learner import make_gradient, make_update
from grpo_jax.models import llama
from grpo_jax.models.attention_kernels import choose
from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule
from grpo_jax.policy import PolicySettings, make_logprobs
from grpo_jax.timing.shapes import Shape
from grpo_jax.types import Algorithm, Batch, Params, Rollout, SamplingParams, TrainState

PAD = 0
ADAMW = OptimSettings(
    lr=1e-6,
    schedule="constant",
    warmup_updates=0,
    final_share=0.0,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
)


@dataclass(frozen=True)
class Settings:
    """How it is computed. `dtype`: of the matmuls; masters are float32 in any case. `beta`: of a
    KL in the loss, 0 for none. `attention` and its block as in `attention_kernels.choose`, `remat`
    and `turn_weights` as in `llama.build`."""

    dtype: str
    micro_rows: int
    vocab_chunk: int
    remat: bool | str
    share_prompts: bool
    beta: float
    attention: str = "xla"
    attention_block: int = 1024
    turn_weights: bool | str = "auto"


class Programs:
    """Programs of one shape, and calls of them. A method named as in `shapes.WHAT` allocates what
    that part needs and returns a call without arguments; its result is to be waited for.

    Nothing is donated but the state, so a call can be repeated; `optimizer` and `step` go on from
    the state of the call before.
    """

    def __init__(self, shape: Shape, settings: Settings, algorithm: Algorithm):
        model = llama.build(
            shape.model,
            dtype=settings.dtype,
            remat=settings.remat,
            attention=choose(settings.attention, settings.attention_block),
            turn_weights=settings.turn_weights,
        )
        policy = PolicySettings(
            temperature=1.0,
            micro_batch_rows=settings.micro_rows,
            vocab_chunk=settings.vocab_chunk,
            share_prompts=settings.share_prompts,
        )
        self.shape, self.algorithm = shape, algorithm
        self.init = jax.jit(model.init)
        self.sampler = JaxSampler(
            model,
            prompt_slots=shape.prompt_slots,
            eos_ids=(shape.model.vocab_size,),  # no such token: every row runs its full budget
            pad_id=PAD,
        )
        self.score = make_logprobs(model, policy)
        self.optimize = make_optimizer(ADAMW, make_schedule(ADAMW, 1))
        self.differentiate = jax.jit(make_gradient(algorithm, model, policy, shape.group))
        self.update = make_update(algorithm, model, self.optimize, policy, shape.group)
        rng = np.random.default_rng(1)
        vocab = shape.model.vocab_size
        self.prompts = [rng.integers(1, vocab, n).tolist() for n in shape.lengths]
        answers = rng.integers(1, vocab, (shape.rows, shape.new_tokens)).tolist()
        each = [prompt for prompt in self.prompts for _ in range(shape.group)]
        given = given_rollout(each, answers, shape.prompt_slots, shape.new_tokens, PAD)
        self.given = jax.tree.map(jnp.asarray, given)
        self.advantage = _advantages(rng, shape)
        self.rows = jnp.arange(shape.rows)
        self.bonus = jnp.float32(0.0)  # of the entropy, as the trainer hands it over: on the device
        self.key = jax.random.key(0)
        self.calls = 0

    # --------------------------------------------------------------------- as the trainer does

    def sample(self, params: Params) -> Rollout:
        """With noise of its own each time. The sampler takes the weights as the trainer holds
        them."""
        self.calls += 1
        self.sampler.load(params, self.calls)
        return self.sampler.sample(
            self.prompts,
            np.arange(self.shape.rows),
            SamplingParams(max_tokens=self.shape.new_tokens),
            jax.random.fold_in(self.key, self.calls),
        )

    def logp(self, params: Params, rollout: Rollout) -> Float[Array, "B T"]:
        return self.score(params, rollout, self.shape.group)[0]

    def params(self) -> Params:
        """New ones, always the same."""
        self.sampler.load({}, 0)  # or it would keep those of an earlier part alive
        return self.init(self.key)

    def state(self) -> TrainState:
        params, key = self.params(), jax.random.clone(self.key)
        return TrainState(params, self.optimize.init(params), jnp.int32(0), key)

    def batch(self, rollout: Rollout, logp: Array, ref_logp: Array | None) -> Batch:
        """Advantages are fixed random numbers: rewards are no part of what is timed."""
        groups = jnp.repeat(jnp.arange(self.shape.prompts), self.shape.group)
        every = jnp.ones(self.shape.rows, bool)
        return Batch(rollout, self.advantage, logp, ref_logp, every, groups)

    def updated(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        return self.update(state, batch, self.rows, self.bonus)

    def reference(self) -> Params | None:
        """A copy of its own, where the algorithm has a KL."""
        return self.params() if self.algorithm.kl.active else None

    # ------------------------------------------------------------------------------- to be timed

    def rollout(self) -> Callable[[], Rollout]:
        return partial(self.sample, self.params())

    def logprobs(self) -> Callable[[], Array]:
        return partial(self.logp, self.params(), self.given)

    def gradient(self) -> Callable[[], Any]:
        """Loss and gradient of one minibatch, which is the whole rollout."""
        # near what random weights say of any token, so that no ratio is far from 1
        guess = jnp.full(self.given.completion.shape, -np.log(self.shape.model.vocab_size))
        batch = self.batch(self.given, guess, guess if self.algorithm.kl.active else None)
        arguments = (self.params(), batch, self.bonus, None, self.key)
        return partial(self.differentiate, *arguments)

    def optimizer(self) -> Callable[[], Params]:
        """Clip and AdamW alone, in place as within the update."""
        state = self.state()
        gradient = jax.tree.map(lambda a: 1e-3 * a, state.trainable)

        @partial(jax.jit, donate_argnums=(0, 1))
        def apply(params, opt_state, gradient, numbers):
            steps, opt_state = self.optimize.update(gradient, opt_state, params, **numbers)
            return optax.apply_updates(params, steps), opt_state

        held = state.trainable, state.opt_state

        def call() -> Params:
            nonlocal held
            held = apply(*held, gradient, self.optimize.numbers(held[1]))
            return held[0]

        return call

    def step(self) -> Callable[[], tuple[TrainState, dict[str, Array]]]:
        """Rollout, log-prob pass (one more of the reference, with a KL), update: the data goes
        through, and stays on the device. Text and rewards lie between in a run."""
        state, reference = self.state(), self.reference()

        def call() -> tuple[TrainState, dict[str, Array]]:
            nonlocal state
            rollout = self.sample(state.trainable)
            logp = self.logp(state.trainable, rollout)
            ref_logp = None if reference is None else self.logp(reference, rollout)
            state, metrics = self.updated(state, self.batch(rollout, logp, ref_logp))
            return state, metrics

        return call


def _advantages(rng: np.random.Generator, shape: Shape) -> Float[Array, " B"]:
    """Of mean 0 in each group."""
    drawn = rng.normal(size=(shape.prompts, shape.group))
    return jnp.asarray((drawn - drawn.mean(1, keepdims=True)).reshape(-1), jnp.float32)
