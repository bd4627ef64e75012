"""What a run needs, from its configuration: nothing is loaded, compiled or allocated.

Shapes come from the real functions under `jax.eval_shape`, bytes at the peak and FLOPs from their
traces (`program.py`). Prompts count with all their slots and answers with the whole budget, so
every figure is "at most". Evaluations are not in it.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.assemble import Run, build_model
from grpo_jax.generate import generate
from grpo_jax.learner import make_update
from grpo_jax.models import hf, llama, lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.optim import make_optimizer, make_schedule
from grpo_jax.plan.program import Cost, cost, kept_for_backward
from grpo_jax.policy import PolicySettings, make_logprobs, token_stats, whole
from grpo_jax.rules import asks
from grpo_jax.types import Batch, Rollout, TrainingError, TrainState


def shape_of(run: Run) -> LlamaConfig:
    """The model's shape: the configuration's, or that of the folder it names. No weights are read.

    Raises TrainingError where neither says it.
    """
    if run.model.shape is not None:
        return run.model.shape
    path = Path(run.model.path or "").expanduser()
    if run.model.path is None or not (path / "config.json").is_file():
        raise TrainingError(
            f"plan: model.shape is null, and there is no {path / 'config.json'} to read it from"
        )
    return hf.read_config(path)


def size(tree: Any) -> int:
    """Bytes of the arrays in a tree of arrays or shapes."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def _array(dtype: Any, *shape: int) -> Any:
    """Stands for an array wherever only shapes matter."""
    return jax.ShapeDtypeStruct(shape, dtype)


_KEY = jax.eval_shape(lambda: jax.random.key(0))


@dataclass(frozen=True)
class Programs:
    """The programs of a run on one of `devices` devices, and the shapes of their arguments."""

    run: Run
    devices: int

    # ------------------------------------------------------------------------------ weights

    @cached_property
    def model(self) -> llama.Model:
        return self._model(self.run.model.remat)

    def _model(self, remat: bool | str) -> llama.Model:
        settings = replace(self.run.model, remat=remat)
        return build_model(settings, shape_of(self.run), self.run.lora.scale, backend="gpu")

    @cached_property
    def base(self) -> Any:
        """The frozen parameters, where there are any (LoRA)."""
        if not self.run.lora.active:
            return None
        initial = jax.eval_shape(self.model.init, _KEY)
        return jax.tree.map(lambda a: _array(self.run.model.base_dtype, *a.shape), initial)

    @cached_property
    def trainable(self) -> Any:
        init = self.model.init
        if self.run.lora.active:
            init = partial(lora.init, self.model.config, self.run.lora)
        return jax.eval_shape(init, _KEY)

    @cached_property
    def reference(self) -> Any:
        """A copy of its own, where the algorithm needs one: with LoRA the base serves."""
        kl = self.run.algorithm.kl
        if not kl.active or (self.base is not None and not kl.refresh_every):
            return None
        return self.trainable

    @cached_property
    def state(self) -> TrainState:
        moves = self.run.algorithm.kl.active and self.run.algorithm.kl.refresh_every > 0
        return TrainState(
            trainable=self.trainable,
            opt_state=jax.eval_shape(self._optimizer.init, self.trainable),
            step=_array(jnp.int32),
            key=_KEY,
            reference=self.reference if moves else None,
        )

    @cached_property
    def _optimizer(self):
        run = self.run
        updates = run.train.steps * run.train.updates_per_rollout
        return make_optimizer(run.optim, make_schedule(run.optim, updates))

    # ------------------------------------------------------------------------------ rollout

    @property
    def prompts(self) -> int:
        """Of one rollout, on this device."""
        return -(-self.run.rollout.prompts // self.devices)

    @property
    def rows(self) -> int:
        return self.prompts * self.run.rollout.group_size

    @property
    def update_rows(self) -> int:
        """Of one optimizer step, on this device."""
        rows = self.run.rollout.prompts * self.run.rollout.group_size
        return max(rows // (self.run.train.minibatches * self.devices), 1)

    @property
    def micro_rows(self) -> int:
        """Of one forward and backward pass: as `policy.cut`."""
        most = min(self.run.train.micro_batch_rows, self.update_rows)
        return next(n for n in range(most, 0, -1) if self.update_rows % n == 0)

    @property
    def slots(self) -> int:
        """Rows that are decoded at a time, on this device: all, or fewer (`refill.py`)."""
        asked = self.run.rollout.slots
        return self.rows if asked is None else min(-(-asked // self.devices), self.rows)

    @property
    def decode_steps(self) -> int:
        """Of one rollout whose answers all take their whole budget."""
        return -(-self.rows // self.slots) * self.run.rollout.max_completion_length

    @cached_property
    def cache(self) -> tuple[Any, Any, Any]:
        """Keys and values: of each prompt once, of the prompts that slots have copies of, and of
        the whole budget of each answer that is decoded at a time."""
        tokens, mask = self._prompts
        prompt = jax.eval_shape(self.model.prefill, self._policy, tokens, mask)[1]
        copies, budget = (), self.run.rollout.max_completion_length
        if self.slots < self.rows:
            copies = jax.eval_shape(self.model.select, prompt, _array(jnp.int32, self.slots))
        return prompt, copies, jax.eval_shape(partial(self.model.empty_cache, self.slots, budget))

    @property
    def _prompts(self) -> tuple:
        shape = (self.prompts, self.run.rollout.max_prompt_length)
        return _array(jnp.int32, *shape), _array(jnp.bool_, *shape)

    @property
    def _policy(self) -> Any:
        return jax.eval_shape(whole, self.base, self.trainable)

    def rollout_cost(self) -> Cost:
        rollout = self.run.rollout
        model, sampling = self.model, rollout.sampling
        sample = partial(generate, model, sampling_params=sampling, eos_ids=(0,), slots=self.slots)
        ids = _array(jnp.int32, self.rows)
        budget = rollout.max_completion_length
        rounds = -(-self.rows // self.slots)
        trips = budget - 1 if rounds == 1 else (rounds, budget)
        return cost(sample, self._policy, *self._prompts, ids, _KEY, trips=trips)

    # ----------------------------------------------------------------------------- training

    @cached_property
    def batch(self) -> Batch:
        B, S = self.rows, self.run.rollout.max_prompt_length
        T = self.run.rollout.max_completion_length
        kl = self.run.algorithm.kl
        per_token, per_row = _array(jnp.float32, B, T), _array(jnp.bool_, B)
        return Batch(
            rollout=Rollout(
                prompt=_array(jnp.int32, B, S),
                prompt_mask=_array(jnp.bool_, B, S),
                completion=_array(jnp.int32, B, T),
                mask=_array(jnp.bool_, B, T),
                sampler_logp=per_token,
                truncated=per_row,
                version=_array(jnp.int32, B),
            ),
            advantage=_array(jnp.float32, B),
            old_logp=per_token,
            ref_logp=per_token if kl.active and kl.where == "loss" else None,
            keep=per_row,
            group=_array(jnp.int32, B),
        )

    @property
    def settings(self) -> PolicySettings:
        train = self.run.train
        return PolicySettings(
            self.run.rollout.temperature,
            train.micro_batch_rows,
            train.vocab_chunk,
            train.share_prompts,
            skip_silent=False,  # every figure is "at most"
        )

    def logprobs_cost(self) -> Cost:
        """Of one pass over the rollout."""
        logprobs, group = make_logprobs(self.model, self.settings), self.run.rollout.group_size
        return cost(lambda p, r: logprobs(p, r, group), self._policy, self.batch.rollout)

    def update_cost(self) -> Cost:
        """Of one optimizer step."""
        run = self.run
        update = make_update(
            run.algorithm, self.model, self._optimizer, self.settings, run.rollout.group_size
        )
        coef = _array(jnp.float32) if run.algorithm.entropy.active else None
        exact = run.algorithm.kl.exact and run.algorithm.kl.where == "loss"
        fixed = self.reference if self.base is None else self.base
        reference = fixed if exact and self.state.reference is None else None
        rows = _array(jnp.int32, self.update_rows)
        arguments = (self.state, self.batch, rows, coef, reference, self.base)
        return cost(update, *arguments, donated=(0,))

    def activations(self, *, remat: bool | str) -> int:
        """Bytes that the forward pass of one micro-batch keeps for its backward pass."""
        rollout = jax.tree.map(
            lambda a: _array(a.dtype, self.micro_rows, *a.shape[1:]), self.batch.rollout
        )
        model, settings = self._model(remat), self.settings
        group = self.run.rollout.group_size

        def forward(trainable, base, rollout):
            params = whole(base, trainable)
            return token_stats(model, settings, params, rollout, group=group).logp

        return kept_for_backward(forward, self.trainable, self.base, rollout)


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for."""

    base: int  # frozen weights (LoRA)
    masters: int  # float32 weights that are trained
    optimizer: int
    reference: int
    gradients: int  # of one micro-batch
    gradient_copies: int  # 2: their sum over the minibatch is as large again
    kept_remat: int  # by the forward pass of a micro-batch, for its backward pass
    kept_plain: int  # the same with model.remat=false
    logits: int  # of one vocabulary chunk of a micro-batch, float32
    prompt_cache: int
    prompt_copies: int  # one a slot, where fewer rows than all are decoded at a time
    answer_cache: int
    batch: int

    @property
    def resident(self) -> int:
        """There all the time."""
        return self.base + self.masters + self.optimizer + self.reference


@dataclass(frozen=True)
class Phase:
    name: str
    arguments: int  # bytes, beside what is resident
    cost: Cost
    layers: int  # that it runs through, one after the other
    times: int  # in a step


@dataclass(frozen=True)
class Plan:
    """All figures of a run; those of memory and the phases' are of one of `devices` devices."""

    run: Run
    devices: int
    shape: LlamaConfig
    trained: int  # parameters
    parameters: int
    memory: Memory
    decode_steps: int  # of one rollout, at most
    phases: tuple[Phase, ...]  # rollout, log-probs, update

    def peak(self, phase: Phase, room: float = 1.0) -> float:
        """Bytes on one device at the phase's worst moment; `room` multiplies the temporary arrays.

        Weights, optimizer state, reference and gradients are divided evenly among the devices, as
        are the rows. Nothing else is.
        """
        memory, share = self.memory, 1 / self.devices
        temporary = phase.cost.bytes
        if phase.name == "update":
            whole = min(memory.gradient_copies * memory.gradients, temporary)
            temporary = temporary - whole + whole * share
        return memory.resident * share + phase.arguments + room * temporary

    @property
    def sampled(self) -> int:
        """Tokens of answers in one rollout, at most."""
        rollout = self.run.rollout
        return rollout.prompts * rollout.group_size * rollout.max_completion_length


def make_plan(run: Run, devices: int = 1) -> Plan:
    """Trace everything that a training step runs. Raises TrainingError without a model shape."""
    programs = Programs(run, devices)
    batch = size(programs.batch)
    rollout = programs.rollout_cost()
    if asks(run.algorithm.baseline, "greedy"):  # one answer more to each prompt, in a second call
        more = 1 + 1 / run.rollout.group_size
        rollout = Cost(rollout.bytes, rollout.flops * more)
    passes = 1 + run.algorithm.kl.active
    trained = lora.count(programs.trainable)
    once = programs.model.config.num_layers
    micro = -(-programs.update_rows // programs.micro_rows)
    scored = -(-programs.rows // programs.micro_rows)
    steps = programs.decode_steps
    back = 3 if run.model.remat else 2  # forward, again, backward
    return Plan(
        run=run,
        devices=devices,
        shape=programs.model.config,
        trained=trained,
        parameters=trained + (0 if programs.base is None else lora.count(programs.base)),
        memory=_memory(programs),
        decode_steps=steps,
        phases=(
            Phase("rollout", 0, rollout, once * steps, 1),
            Phase("log-probs", batch, programs.logprobs_cost(), once * scored, passes),
            Phase(
                "update",
                batch,
                programs.update_cost(),
                once * micro * back,
                run.train.updates_per_rollout,
            ),
        ),
    )


def _memory(programs: Programs) -> Memory:
    run, vocabulary = programs.run, programs.model.config.vocab_size
    width = -(-vocabulary // -(-vocabulary // run.train.vocab_chunk))  # as `token_logprobs` cuts
    prompt, copies, answers = programs.cache
    return Memory(
        base=0 if programs.base is None else size(programs.base),
        masters=size(programs.trainable),
        optimizer=size(programs.state.opt_state),
        reference=0 if programs.reference is None else size(programs.reference),
        gradients=size(programs.trainable),
        gradient_copies=1 if programs.micro_rows == programs.update_rows else 2,
        kept_remat=programs.activations(remat=True),
        kept_plain=programs.activations(remat=False),
        logits=4 * programs.micro_rows * run.rollout.max_completion_length * width,
        prompt_cache=size(prompt),
        prompt_copies=size(copies),
        answer_cache=size(answers),
        batch=size(programs.batch),
    )
