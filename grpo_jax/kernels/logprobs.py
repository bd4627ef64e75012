"""Log-probability and entropy of tokens, straight from hidden states, without an N x V array.

The loss needs two numbers a position, log p(target) and the entropy, but the logits they come from
are by far the largest array of a step. The head is therefore read in vocabulary chunks and the
softmax statistics are carried along (online softmax: Milakov and Gimelshein, arXiv:1805.02867, alg.
3); the backward pass computes each chunk's logits again instead of keeping them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Finite, unlike -inf: the first rescale is then 0 * finite = 0 and not 0 * inf = NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def token_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " N"],
    *,
    temperature: float | Float[Array, ""],
    chunk: int,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log-probability of `targets` and entropy (nats) under softmax(hidden @ head.T / temperature).

    hidden [N, D] and head [V, D] are of any float dtype; products accumulate in float32. targets
    [N] are integers in [0, V). temperature (> 0, may be traced) divides the float32 logits, as in
    `sampling.sample`, so that both speak of the same distribution. chunk is the most vocabulary
    rows whose logits exist at one time: a few N x min(chunk, V) arrays, backward included.
    The head is padded (copied) where V does not divide into equal chunks.

    Returns float32 (logp [N], entropy [N]), both differentiable in hidden, head and temperature.
    Finite for finite logits. Raises ValueError for chunk < 1, or a temperature <= 0 known at trace
    time.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 vocabulary row, got {chunk}")
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    vocabulary = head.shape[0]
    count = -(-vocabulary // chunk)
    width = -(-vocabulary // count)
    padding = count * width - vocabulary
    if padding:
        head = jnp.pad(head, ((0, padding), (0, 0)))
    chunks = head.reshape(count, width, head.shape[1])

    def body(carry, chunk_and_start):
        rows, start = chunk_and_start
        logits = jnp.einsum("nd,vd->nv", hidden, rows, preferred_element_type=jnp.float32)
        return _absorb(carry, logits / temperature, targets - start, vocabulary - start), None

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    carry = (jnp.full_like(zeros, _LOWEST), zeros, zeros, zeros)
    if count == 1:  # within the caller's own bound: keep the logits, don't multiply twice
        carry, _ = body(carry, (chunks[0], 0))
    else:
        starts = jnp.arange(count, dtype=jnp.int32) * width
        # prevent_cse=False: a scan already keeps XLA from merging forward and recomputation.
        carry, _ = lax.scan(jax.checkpoint(body, prevent_cse=False), carry, (chunks, starts))
    top, total, weighted, chosen = carry
    log_total = jnp.log(total)
    return chosen - top - log_total, log_total - weighted / total


def _absorb(carry, logits, local_target, valid):
    """Fold one chunk's logits f32[N, W] into (running max, sum e, sum e*(z - max), target's logit).

    `local_target` i32[N] is the target's column, outside [0, W) in other chunks; columns from
    `valid` on are padding. Values are kept relative to the maximum, so that the entropy is not the
    difference of two large numbers.
    """
    top, total, weighted, chosen = carry
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)
    real = column < valid
    # Any constant shift gives the same result, so the maximum needs no gradient.
    peak = lax.stop_gradient(jnp.max(logits, axis=1, initial=_LOWEST, where=real))
    new_top = jnp.maximum(top, peak)
    shift = top - new_top
    decay = jnp.exp(shift)
    # Padding is masked on the input of exp: neither value nor gradient sees it.
    centred = jnp.where(real, logits - new_top[:, None], 0.0)
    mass = jnp.where(real, jnp.exp(centred), 0.0)
    hit = column == local_target[:, None]
    return (
        new_top,
        decay * total + jnp.sum(mass, axis=1),
        decay * (weighted + shift * total) + jnp.sum(mass * centred, axis=1),
        chosen + jnp.sum(jnp.where(hit, logits, 0.0), axis=1),
    )
