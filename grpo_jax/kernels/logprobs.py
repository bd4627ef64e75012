"""Log-probability and entropy of tokens, straight from hidden states, without an N x V array.

The loss needs two numbers a position, log p(target) and the entropy, but the logits they come from
are by far the largest array of a step. The head is therefore read in vocabulary chunks and the
softmax statistics are carried along (online softmax: Milakov and Gimelshein, arXiv:1805.02867, alg.
3). The backward pass computes each chunk's logits again instead of keeping them, and their gradient
in one pass from what the forward left of a position: its log-normaliser and its entropy.
"""

from functools import partial

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

    hidden [N, D] and head [V, D] are of any float dtype, head is converted to hidden's a chunk at a
    time; products accumulate in float32, and the head's gradient is rounded once. targets
    [N] are integers in [0, V). temperature (> 0, may be traced) divides the float32 logits, as in
    `sampling.sample`, so that both speak of the same distribution. chunk is the most vocabulary
    rows whose logits exist at one time: a few N x min(chunk, V) arrays, backward included.
    The head is padded (copied) where V does not divide into equal chunks.

    Returns float32 (logp [N], entropy [N]), both differentiable in hidden, head and temperature.
    Finite for finite logits. Raises ValueError for chunk < 1, or a temperature <= 0 known at trace
    time.
    """
    _check(temperature, chunk)
    temperature = jnp.asarray(temperature, jnp.float32)
    return _token_logprobs(hidden, head, targets, temperature, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_logprobs(hidden, head, targets, temperature, chunk):
    return _logprobs_forward(hidden, head, targets, temperature, chunk)[0]


def _logprobs_forward(hidden, head, targets, temperature, chunk):
    chunks, starts = _cut(head, chunk)

    def logits_of(rows):
        return _product("nd,vd->nv", hidden, rows.astype(hidden.dtype))

    def body(carry, chunk_and_start):
        rows, start = chunk_and_start
        scaled = logits_of(rows) / temperature
        return _absorb(carry, scaled, targets - start, len(head) - start), None

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    carry = (jnp.full_like(zeros, _LOWEST), zeros, zeros, zeros)
    kept = None
    if len(chunks) == 1:  # within the caller's own bound: keep the logits, don't multiply twice
        kept = logits_of(head) / temperature
        carry = _absorb(carry, kept, targets, len(head))
    else:
        carry, _ = lax.scan(body, carry, (chunks, starts))
    top, total, weighted, chosen = carry
    log_total = jnp.log(total)
    entropy = log_total - weighted / total
    saved = hidden, head, targets, temperature, top + log_total, entropy, kept
    return (chosen - top - log_total, entropy), saved


def _logprobs_backward(chunk, saved, gradient):
    """Of logit z_j, with p its probability, t the target and H the entropy:
    d log p_t = [j = t] - p_j and dH = -p_j (log p_j + H)."""
    hidden, head, targets, temperature, log_normaliser, entropy, kept = saved
    of_logp, of_entropy = (g[:, None] for g in gradient)
    chunks, starts = _cut(head, chunk)

    def of_chunk(rows, start, scaled):
        column = jnp.arange(len(rows), dtype=jnp.int32)
        logp = scaled - log_normaliser[:, None]
        # padding is masked on the input of exp: neither value nor gradient sees it
        p = jnp.exp(jnp.where(column < len(head) - start, logp, _LOWEST))
        back = -p * (of_logp + of_entropy * (jnp.where(p > 0, logp, 0.0) + entropy[:, None]))
        back = back + jnp.where(column == (targets - start)[:, None], of_logp, 0.0)
        to_temperature = -jnp.sum(back * scaled) / temperature
        back = (back / temperature).astype(hidden.dtype)
        to_hidden = _product("nv,vd->nd", back, rows.astype(hidden.dtype))
        to_head = _product("nv,nd->vd", back, hidden).astype(head.dtype)
        return to_hidden, to_temperature, to_head

    def body(total, chunk_and_start):
        rows, start = chunk_and_start
        scaled = _product("nd,vd->nv", hidden, rows.astype(hidden.dtype)) / temperature
        *parts, to_head = of_chunk(rows, start, scaled)
        return jax.tree.map(jnp.add, total, tuple(parts)), to_head

    if kept is not None:
        to_hidden, to_temperature, to_head = of_chunk(head, 0, kept)
    else:
        zero = jnp.zeros(hidden.shape, jnp.float32), jnp.float32(0)
        (to_hidden, to_temperature), to_head = lax.scan(body, zero, (chunks, starts))
        to_head = to_head.reshape(-1, head.shape[1])[: len(head)]
    return to_hidden.astype(hidden.dtype), to_head, None, to_temperature


_token_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def token_kl(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    ref_hidden: Float[Array, "N E"],
    ref_head: Float[Array, "W E"],
    *,
    temperature: float | Float[Array, ""],
    chunk: int,
) -> Float[Array, " N"]:
    """KL(policy || reference) in nats at each position, summed over the whole vocabulary.

    The policy is softmax(hidden @ head.T / temperature), the reference the same of `ref_hidden` and
    `ref_head`. This is what the estimators of `kernels/kl.py` estimate from one sampled token.

    Types, `temperature` and `chunk` are as in `token_logprobs`, with two arrays of logits in memory
    instead of one. Returns float32 [N], differentiable in hidden, head and (through the policy)
    temperature; the reference has no gradient. Not below 0, and 0 for equal logits, up to a
    rounding error of some 1e-7. Raises ValueError as `token_logprobs`, and for vocabularies of
    unequal sizes.
    """
    _check(temperature, chunk)
    if len(head) != len(ref_head):
        raise ValueError(f"the policy has {len(head)} tokens, the reference {len(ref_head)}")
    ref_hidden, ref_head = lax.stop_gradient((ref_hidden, ref_head))
    chunks, starts = _cut(head, chunk)
    ref_chunks, _ = _cut(ref_head, chunk)
    ref_temperature = lax.stop_gradient(temperature)

    def body(carry, chunk_and_start):
        rows, ref_rows, start = chunk_and_start
        logits = _product("nd,vd->nv", hidden, rows.astype(hidden.dtype))
        ref = _product("nd,vd->nv", ref_hidden, ref_rows.astype(ref_hidden.dtype))
        scaled = logits / temperature, ref / ref_temperature
        return _absorb_pair(carry, *scaled, len(head) - start), None

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    lowest = jnp.full_like(zeros, _LOWEST)
    carry = (lowest, zeros, lowest, zeros, zeros)
    _, total, _, ref_total, weighted = _fold(body, carry, (chunks, ref_chunks, starts))
    return weighted / total + jnp.log(ref_total) - jnp.log(total)


def _product(contraction: str, a, b):
    return jnp.einsum(contraction, a, b, preferred_element_type=jnp.float32)


def _check(temperature: float | Float[Array, ""], chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 vocabulary row, got {chunk}")
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _cut(head: Float[Array, "V D"], chunk: int) -> tuple[Float[Array, "C W D"], Int[Array, " C"]]:
    """Equal chunks of at most `chunk` rows, the last one padded, and each one's first row."""
    count = -(-len(head) // chunk)
    width = -(-len(head) // count)
    padding = count * width - len(head)
    if padding:
        head = jnp.pad(head, ((0, padding), (0, 0)))
    return head.reshape(count, width, head.shape[1]), jnp.arange(count, dtype=jnp.int32) * width


def _fold(body, carry, chunks):
    """The last carry of `body` over the chunks, whose logits the backward pass computes again."""
    if len(chunks[0]) == 1:  # within the caller's own bound: keep the logits, don't multiply twice
        return body(carry, jax.tree.map(lambda a: a[0], chunks))[0]
    # prevent_cse=False: a scan already keeps XLA from merging forward and recomputation.
    return lax.scan(jax.checkpoint(body, prevent_cse=False), carry, chunks)[0]


def _absorb(carry, logits, local_target, valid):
    """Fold one chunk's logits f32[N, W] into (running max, sum e, sum e*(z - max), target's logit).

    `local_target` i32[N] is the target's column, outside [0, W) in other chunks; columns from
    `valid` on are padding. Values are kept relative to the maximum, so that the entropy is not the
    difference of two large numbers.
    """
    top, total, weighted, chosen = carry
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)
    new_top, shift, centred, mass = _rescale(top, logits, column < valid)
    decay = jnp.exp(shift)
    hit = column == local_target[:, None]
    return (
        new_top,
        decay * total + jnp.sum(mass, axis=1),
        decay * (weighted + shift * total) + jnp.sum(mass * centred, axis=1),
        chosen + jnp.sum(jnp.where(hit, logits, 0.0), axis=1),
    )


def _absorb_pair(carry, logits, ref, valid):
    """Fold one chunk of policy and reference logits f32[N, W] into a carry of five f32[N].

    They are the policy's (running max, sum e), the reference's, and
    sum e * ((z - max) - (z_ref - max_ref)) with e of the policy; columns from `valid` on are
    padding. Both logits are kept relative to their own maximum, so that neither an offset of the
    one nor of the other costs digits.
    """
    top, total, ref_top, ref_total, weighted = carry
    real = jnp.arange(logits.shape[1], dtype=jnp.int32) < valid
    new_top, shift, centred, mass = _rescale(top, logits, real)
    new_ref_top, ref_shift, ref_centred, ref_mass = _rescale(ref_top, ref, real)
    decay = jnp.exp(shift)
    return (
        new_top,
        decay * total + jnp.sum(mass, axis=1),
        new_ref_top,
        jnp.exp(ref_shift) * ref_total + jnp.sum(ref_mass, axis=1),
        decay * (weighted + (shift - ref_shift) * total)
        + jnp.sum(mass * (centred - ref_centred), axis=1),
    )


def _rescale(top, logits, real):
    """(max with this chunk, what the old one is above it, logits relative to it, their exp)."""
    # Any constant shift gives the same result, so the maximum needs no gradient.
    peak = lax.stop_gradient(jnp.max(logits, axis=1, initial=_LOWEST, where=real))
    new_top = jnp.maximum(top, peak)
    # Padding is masked on the input of exp: neither value nor gradient sees it.
    centred = jnp.where(real, logits - new_top[:, None], 0.0)
    return new_top, top - new_top, centred, jnp.where(real, jnp.exp(centred), 0.0)
