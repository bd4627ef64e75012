"""Continuous batching: fewer slots than rows, and where a row has ended, a waiting one goes on.

The plain loop (generate.py) decodes every row until the last one has ended. This one decodes in
`slots` slots, so the answers' keys and values are those of `slots` rows, and few steps are spent on
rows that have ended. Rows are taken in order; which slot one runs in, and when, changes nothing
that it samples. A slot reads a copy of its row's prompt, where rows of the plain loop share one.

Two loops, one in the other: the inner one decodes, the outer one gives rows to the free slots.

It pays where few answers are long: a step costs by its slots, and all rows at once are B of them
until the longest has ended. CPU seconds of a Llama (4 layers, 128 channels) on one core, 256 rows
with at most 256 tokens, 8 to a prompt of 64, at once and in 128, 64 and 32 slots:

    lengths geometric, mean 27    6.5 (232 steps)  3.8 (238)  1.8 (266)  0.95 (323)
    every row 256 tokens          7.4 (255)        8.3 (512)  7.9 (1024)  6.7 (2048)

Long prompts that many rows share take some of it back: with 1024 tokens, 32 rows to each, the first
line is 7.3 at once and 5.4 in 32 slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.models.llama import Model
from grpo_jax.types import Params

# Rows are given out once 1/8 of the slots is free, as each time all slots' prompts are copied. One
# free slot instead costs 14 % of the time with prompts of 1024 tokens, and 1 % with 256 (32 slots).
SHARE = 8


@dataclass(frozen=True)
class Job:
    """What is to be sampled, inside a program: B/P completions of each prompt."""

    model: Model
    layers: Params  # of `model.unstack`
    draw: Callable  # (hidden [R,D], row_ids [R], t) -> (token i32[R], log-prob): token t of rows
    hidden: Float[Array, "P D"]  # that first tokens are drawn from; of `model.prefill`, as `cache`
    cache: Any
    mask: Bool[Array, "P S"]
    row_ids: Int[Array, "B"]
    ends: Int[Array, "E"]
    budget: int  # T

    @property
    def group(self) -> int:
        return len(self.row_ids) // len(self.mask)


class _State(NamedTuple):
    row: Int[Array, "R"]  # of each slot; B once none was left for it
    age: Int[Array, "R"]  # tokens that its row has
    live: Bool[Array, "R"]  # its row goes on
    hidden: Float[Array, "R D"]  # that its next token is drawn from
    cache: Any  # of R answers, a ring: step n writes column n mod T of all slots
    waiting: Int[Array, ""]  # the first row that no slot has had yet
    step: Int[Array, ""]
    tokens: Int[Array, "B T"]
    logp: Float[Array, "B T"]
    length: Int[Array, "B"]
    ended: Bool[Array, "B"]  # by one of `ends`


def decode(
    job: Job, slots: int
) -> tuple[
    Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B"], Bool[Array, "B"], Int[Array, ""]
]:
    """Run a job in `slots` slots, at most B -> tokens, log-probs, lengths, ended, decode steps.

    What lies past a row's length is 0.
    """
    B, T, R = len(job.row_ids), job.budget, slots
    state = _State(
        row=jnp.full(R, B),
        age=jnp.zeros(R, jnp.int32),
        live=jnp.zeros(R, bool),
        hidden=jnp.zeros((R, job.hidden.shape[1]), job.hidden.dtype),
        cache=job.model.empty_cache(R, T),
        waiting=jnp.int32(0),
        step=jnp.int32(0),
        tokens=jnp.zeros((B, T), jnp.int32),
        logp=jnp.zeros((B, T), jnp.float32),
        length=jnp.zeros(B, jnp.int32),
        ended=jnp.zeros(B, bool),
    )
    state = lax.while_loop(
        lambda s: anywhere(s.waiting < B), lambda s: _run(job, _take(job, s)), state
    )
    return state.tokens, state.logp, state.length, state.ended, state.step


def _take(job: Job, state: _State) -> _State:
    """Every free slot gets a row, in order, while there are any."""
    B, free = len(job.row_ids), ~state.live
    row = jnp.where(free, state.waiting + jnp.cumsum(free) - 1, state.row)
    row = jnp.minimum(row, B)
    first = job.hidden[_prompt(job, row)]
    return state._replace(
        row=row,
        age=jnp.where(free, 0, state.age),
        live=row < B,
        hidden=jnp.where(free[:, None], first, state.hidden),
        waiting=jnp.minimum(state.waiting + free.sum(), B),
    )


def _run(job: Job, state: _State) -> _State:
    """Decode until rows are to be given out, or the last row has ended."""
    prompt = _prompt(job, state.row)
    cache, mask = job.model.select(job.cache, prompt), job.mask[prompt]
    ids = job.row_ids[jnp.minimum(state.row, len(job.row_ids) - 1)]

    def due(state: _State) -> Bool[Array, ""]:
        """Enough slots are free; fewer will do for the last rows."""
        left = len(job.row_ids) - state.waiting
        enough = jnp.minimum(max(len(state.row) // SHARE, 1), left)
        return (left > 0) & ((~state.live).sum() >= enough)

    step = partial(_step, job, ids, cache, mask, mask.sum(-1))
    return lax.while_loop(lambda s: anywhere(s.live.any()) & ~anywhere(due(s)), step, state)


def _step(job: Job, ids, cache, mask, start, state: _State) -> _State:
    """Every slot draws a token and decodes it; what is drawn for a row that has ended is dropped.

    Of each slot: `ids`, its row's id; `cache` and `mask`, its prompt's; `start`, where that ends.
    """
    T, age = job.budget, state.age
    token, logp = job.draw(state.hidden, ids, age)
    ended = jnp.isin(token, job.ends)
    row = jnp.where(state.live, state.row, len(job.row_ids))  # that one is not there to be written
    column = state.step % T
    # a row has at most T tokens: what is older in the ring belongs to the row before it
    visible = (column - jnp.arange(T)) % T <= age[:, None]
    hidden, kept = job.model.decode(
        job.layers, token, start + age, cache, mask, state.cache, column, visible
    )
    return state._replace(
        age=age + 1,
        live=state.live & ~ended & (age < T - 1),
        hidden=hidden,
        cache=kept,
        step=state.step + 1,
        tokens=state.tokens.at[row, age].set(token, mode="drop"),
        logp=state.logp.at[row, age].set(logp, mode="drop"),
        length=state.length.at[row].set(age + 1, mode="drop"),
        ended=state.ended.at[row].set(ended, mode="drop"),
    )


def _prompt(job: Job, row: Int[Array, "R"]) -> Int[Array, "R"]:
    """Of rows; a slot without one reads the last."""
    return jnp.minimum(row // job.group, len(job.mask) - 1)


@custom_vmap
def anywhere(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """`flag` itself; of runs that share a program (together.py), whether any has it. A loop goes on
    for all of them then. With a condition each, every step would choose by run what it keeps, the
    cache included."""
    return flag


@anywhere.def_vmap
def _anywhere(size: int, batched: list[bool], flag: Bool[Array, "..."]):
    return flag.any(), False
