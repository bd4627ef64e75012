"""Drawing tokens from logits: a two-level inverse CDF, greedy choice, and noise by global row id.

One uniform number a row is turned into a token by inverting the cumulative distribution in two
steps: over sums of vocabulary blocks, then inside the chosen block. That is one pass over the
logits and no sort, where a Gumbel draw needs a random number for every vocabulary entry.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key


def sample(
    uniform: Float[Array, " B"],
    logits: Float[Array, "B V"],
    *,
    temperature: float | Float[Array, ""],
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw one token a row, with its log-probability (nats) under the distribution drawn from.

    uniform [B] in [0, 1); logits [B, V] of any float dtype, used as float32; temperature (> 0, may
    be traced) divides them. top_k (0 = off) keeps the k largest logits, the lower id winning a tie.
    top_p (1 = off) then keeps a token while the mass of the more probable ones BEFORE it is < top_p
    (Holtzman et al., arXiv:1904.09751). Both are Python numbers and renormalise what is left, so
    the log-prob is not that of `logprobs.token_logprobs`. top_p alone sorts the vocabulary, slow
    for a large V; together with top_k only k entries are ordered.

    Returns (token i32[B], logp f32[B]). A token of probability 0 (logit -inf, or so low that its
    float32 weight is 0) is never drawn. A float32 uniform has steps of about 1e-7, so the rates of
    single tokens are right to that absolute precision. A row holding NaN or +inf, or -inf only, has
    no distribution: its logp is NaN and its token arbitrary, though in range.
    Raises ValueError for top_k < 0, top_p outside (0, 1], or a temperature <= 0 known at trace time
    (for temperature 0 use `greedy`).
    """
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 0 means `greedy`")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or positive, got {top_k}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    scaled = logits.astype(jnp.float32) / temperature
    if top_k == 0 and top_p == 1.0:
        return _inverse_cdf(uniform, scaled)
    vocabulary = scaled.shape[-1]
    kept, ids = lax.top_k(scaled, min(top_k, vocabulary) if top_k else vocabulary)
    if top_p < 1.0:
        reached = jnp.cumsum(jax.nn.softmax(kept, axis=-1), axis=-1)
        before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
        kept = jnp.where(before < top_p, kept, -jnp.inf)
    rank, logp = _inverse_cdf(uniform, kept)
    return jnp.take_along_axis(ids, rank[:, None], axis=1)[:, 0], logp


def greedy(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The largest logit's id (the lowest id of a tie) and log-prob 0: the policy is a point mass.

    logits [B, V] of any float dtype -> (token i32[B], zeros f32[B]). What temperature 0 means.
    """
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, jnp.zeros(token.shape, jnp.float32)


def row_uniform(
    key: Key[Array, ""], row_ids: Int[Array, " B"], step: int | Int[Array, "#B"] | Int[Array, ""]
) -> Float[Array, " B"]:
    """One uniform number in [0, 1) a row, float32, a function of (key, global row id, step) only.

    row_ids i32[B] are ids over the whole rollout, not positions in this batch: how rows are split
    into batches, processes or shards then changes nothing. step is the number of the token in its
    row: one for all rows or one each, may be traced.
    """

    def draw(row_id, step):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row_id), step))

    return jax.vmap(draw)(row_ids, jnp.broadcast_to(step, row_ids.shape))


def _inverse_cdf(uniform, logits):
    """(index i32[B], log-prob f32[B]) of one draw a row from softmax(logits f32[B, V])."""
    rows, vocabulary = logits.shape
    # Blocks of about sqrt(V): both levels then scan about as many entries.
    block = 1 << ((vocabulary - 1).bit_length() // 2)
    padding = -vocabulary % block
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    blocks = logits.reshape(rows, -1, block)
    top = jnp.max(logits, axis=1)
    mass = jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=2)
    total = jnp.sum(mass, axis=1)
    block_id, before = _first_above(mass, uniform * total)
    # Only the chosen block is exponentiated again, so no [B, V] array of weights has to be stored.
    inside = jnp.take_along_axis(blocks, block_id[:, None, None], axis=1)[:, 0]
    column, _ = _first_above(jnp.exp(inside - top[:, None]), uniform * total - before)
    chosen = jnp.take_along_axis(inside, column[:, None], axis=1)[:, 0]
    # A row with NaN finds no block and ends in padding: keep its index in range.
    index = jnp.minimum(block_id * block + column, vocabulary - 1)
    return index, chosen - top - jnp.log(total)


def _first_above(weights, target):
    """First entry of weights [B, n] with positive weight whose cumulative sum exceeds target [B].

    Returns (index i32[B], sum before it f32[B]). Rounding may leave the target at or above the last
    sum, and a parallel cumulative sum may step where the weight is 0; hence only entries of
    positive weight count, and the last such entry is the answer when none exceeds the target.
    """
    reached = jnp.cumsum(weights, axis=1)
    positive = weights > 0
    above = positive & (reached > target[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=1)
    index = jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1), last).astype(jnp.int32)
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    return index, jnp.take_along_axis(before, index[:, None], axis=1)[:, 0]
