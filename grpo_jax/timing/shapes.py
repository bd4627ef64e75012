"""What is timed: model shapes with a batch, and how much work each part of a step is.

The work is the MODEL's, by one convention however a program gets it done: 2 FLOPs for each multiply
and add of the matmuls of the plain computation, row by row. Every one of the B rows has its own
prompt; padding counts nothing; attention counts every pair of a row's tokens, also those that the
causal mask removes; the head counts for completion tokens alone; a backward pass is twice its
forward pass. So what sharing prompts saves, or what remat computes twice, changes the seconds and
never the work, and shares of the peak compare with programs that do neither.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from grpo_jax.models.config import LlamaConfig

WHAT = ("rollout", "logprobs", "gradient", "optimizer", "step")
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """A model and a batch: P prompts of `shortest` to S tokens in S slots, G answers of T tokens
    each; B = P*G rows. `micro_rows`: rows of one pass, where a CPU has it best."""

    name: str
    model: LlamaConfig
    prompts: int
    group: int
    prompt_slots: int
    shortest: int
    new_tokens: int
    micro_rows: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Completion tokens of one rollout: every row runs its full budget."""
        return self.rows * self.new_tokens

    @property
    def lengths(self) -> Int[np.ndarray, " P"]:
        """Of the prompts, in tokens: evenly drawn, the same each time, the longest one in full."""
        drawn = np.random.default_rng(0).integers(
            self.shortest, self.prompt_slots + 1, self.prompts
        )
        drawn[0] = self.prompt_slots
        return drawn


TINY = Shape(
    name="tiny",
    model=LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=384,
    ),
    prompts=8,
    group=8,
    prompt_slots=64,
    shortest=32,
    new_tokens=96,
    micro_rows=8,
)
SMALL = Shape(  # the model is that of SmolLM2-135M
    name="small",
    model=LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
    ),
    prompts=2,
    group=8,
    prompt_slots=64,
    shortest=48,
    new_tokens=64,
    micro_rows=8,
)
SHAPES = {shape.name: shape for shape in (TINY, SMALL)}


def layer_weights(model: LlamaConfig) -> int:
    """Weights of the matmuls of all layers: each meets every token once."""
    D, h, H, K = model.hidden_size, model.head_dim, model.num_heads, model.num_kv_heads
    return model.num_layers * (D * h * (2 * H + 2 * K) + 3 * D * model.intermediate_size)


def head_weights(model: LlamaConfig) -> int:
    return model.vocab_size * model.hidden_size


def parameters(model: LlamaConfig) -> int:
    """Of a plain Llama: no biases, no query or key norms."""
    embeddings = head_weights(model) * (1 if model.tie_embeddings else 2)
    return layer_weights(model) + embeddings + (2 * model.num_layers + 1) * model.hidden_size


def forward_flops(shape: Shape) -> float:
    """Of one forward pass over all rows, prompts and completions (a log-prob pass)."""
    n = shape.lengths + shape.new_tokens
    return _total(shape, tokens=n, pairs=n**2)


def rollout_flops(shape: Shape) -> float:
    """Of sampling: the first token comes from the prompt's pass, each other from a pass of one
    token that sees what is before it and itself."""
    n, later = shape.lengths, np.arange(1, shape.new_tokens)
    return _total(shape, tokens=n + len(later), pairs=n**2 + (n[:, None] + later).sum(1))


def _total(shape: Shape, tokens: Int[np.ndarray, " P"], pairs: Int[np.ndarray, " P"]) -> float:
    """Of all rows. Of each prompt's rows: tokens that go through the layers, pairs that attend."""
    model = shape.model
    layers = 2 * layer_weights(model) * tokens
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * pairs  # scores, values
    head = 2 * head_weights(model) * shape.new_tokens
    return float(shape.group * (layers + attention + head).sum())


def flops(shape: Shape, what: str, *, reference: bool = False) -> float | None:
    """Of one call, by the convention above; None for the optimizer, which has no matmul.

    `reference`: the step has a log-prob pass of a reference policy too (KL).
    """
    forward = forward_flops(shape)
    step = rollout_flops(shape) + (1 + reference + 3) * forward
    return {
        "rollout": rollout_flops(shape),
        "logprobs": forward,
        "gradient": 3 * forward,
        "step": step,
    }.get(what)


def least_bytes(shape: Shape, what: str, dtype: str) -> float | None:
    """Bytes that one call has to read and write at least, where memory is what bounds it.

    A rollout reads all matmul weights, in the compute dtype, for each of T tokens. AdamW reads
    parameters, gradients (also for their norm) and two moments, and writes all but the gradients:
    7 passes of float32 and one more. None for the others.
    """
    if what == "rollout":
        weights = layer_weights(shape.model) + head_weights(shape.model)
        return float(shape.new_tokens * weights * BYTES[dtype])
    return float(8 * 4 * parameters(shape.model)) if what == "optimizer" else None
