"""A tabular policy whose answers have a length: a first token, right or wrong, and then filler.

The first token alone decides whether the answer is right. After it, an answer ends at each slot
with a probability of its own (a hazard), which may differ between right and wrong answers and, if
the table is that wide, between slots. So the expected length of a right and of a wrong answer can
be read off the parameters, with no sampling noise.

The parameter tree is {"branch": f32[], "stop": f32[2, P]}: the logit of a right first token, and
logits of stopping, row 0 after a wrong first token, row 1 after a right one. Column j belongs to
the j-th slot after the first token, the last column to all slots from P-1 on (P = 1: one hazard).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from grpo_jax.kernels.masked import completion_mask
from grpo_jax.kernels.sampling import row_uniform
from grpo_jax.types import Params, Rollout

WRONG, RIGHT, FILLER, STOP = range(4)  # token ids; STOP is the EOS


def init(*, right: float, mean_length: float, columns: int = 1) -> Params:
    """A policy with P(right first token) = `right` and geometric lengths, the same for both.

    Args:
      right: between 0 and 1, both excluded.
      mean_length: tokens after the first one, STOP included, of an answer that is never cut off.
      columns: P, the width of the table of hazards.
    """
    hazard = 1 / mean_length
    return {
        "branch": jnp.log(jnp.float32(right / (1 - right))),
        "stop": jnp.full((2, columns), jnp.log(hazard / (1 - hazard)), jnp.float32),
    }


def logps(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Log-probability (nats, f32) of each token given those before it, at temperature 1.

    Column 0 of `tokens` holds WRONG or RIGHT, the others FILLER or STOP. What stands behind the
    STOP is nothing that the policy samples: finite, and to be masked.
    """
    first, rest = tokens[:, :1], tokens[:, 1:]
    stop = _stop_logits(params, rest.shape[1])
    logit = jnp.where(first == RIGHT, stop[RIGHT], stop[WRONG])
    branch = jax.nn.log_sigmoid(jnp.where(first == RIGHT, 1, -1) * params["branch"])
    ends = jax.nn.log_sigmoid(jnp.where(rest == STOP, logit, -logit))
    return jnp.concatenate([branch, ends], axis=1)


def sample(
    params: Params,
    prompts: Int[Array, "B"],
    key: Key[Array, ""],
    step: int | Int[Array, ""],
    *,
    longest: int,
) -> Rollout:
    """One answer for each row at temperature 1: T = 1 + `longest` slots, S = 1.

    The prompt is a number that the policy does not see. Two uniform numbers a row are inverted, one
    for the first token and one for the length; they are functions of (key, row, step) only. A row
    that has no STOP in its T tokens counts as truncated.
    """
    rows = len(prompts)
    noise = jax.vmap(lambda stream: row_uniform(stream, jnp.arange(rows), step))
    coin, uniform = noise(jax.random.split(key))
    right = coin < jax.nn.sigmoid(params["branch"])
    ended = 1 - _survival(params, longest)  # [2, longest]: by each slot, this one included
    # slots at which an answer is not over yet; `longest` of them: never within the budget
    fillers = jnp.where(
        right,
        jnp.searchsorted(ended[RIGHT], uniform, side="right"),
        jnp.searchsorted(ended[WRONG], uniform, side="right"),
    )[:, None]
    slot = jnp.arange(longest)
    first = jnp.where(right, RIGHT, WRONG)[:, None]
    tokens = jnp.concatenate([first, jnp.where(slot < fillers, FILLER, STOP)], axis=1)
    mask = completion_mask(tokens, (STOP,))
    return Rollout(
        prompt=prompts[:, None],
        prompt_mask=jnp.ones((rows, 1), bool),
        completion=tokens,
        mask=mask,
        sampler_logp=jnp.where(mask, logps(params, tokens), 0),
        truncated=fillers[:, 0] == longest,
        version=jnp.full(rows, step, jnp.int32),
    )


def expected_length(params: Params, longest: int) -> Float[Array, "2"]:
    """Mean tokens after the first one (STOP included, at most `longest`) of a wrong and of a right
    answer: the sum over slots of the probability that the slot is reached."""
    return 1 + _survival(params, longest)[:, :-1].sum(1)


def _stop_logits(params: Params, slots: int) -> Float[Array, "2 slots"]:
    column = jnp.minimum(jnp.arange(slots), params["stop"].shape[1] - 1)
    return params["stop"][:, column]


def _survival(params: Params, slots: int) -> Float[Array, "2 slots"]:
    """Probability that an answer goes on after each slot."""
    return jnp.exp(jnp.cumsum(jax.nn.log_sigmoid(-_stop_logits(params, slots)), axis=1))
