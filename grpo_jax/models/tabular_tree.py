"""A policy that is a table with a row of logits for each prefix, and every answer it can give.

Answers have a length here, unlike those of `tabular.py`, and are few enough to list: an expectation
over them is a finite sum, and what an estimator is expected to do can be computed, not sampled.
The parameter tree is {"logits": float[P, V]}; everything keeps its dtype, float64 included.
"""

from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax.types import Params


@dataclass(frozen=True)
class Tree:
    """All S answers to one prompt: those that end with EOS within T tokens, and the truncated."""

    tokens: Int[np.ndarray, "S T"]  # right-padded with EOS
    mask: Bool[np.ndarray, "S T"]  # True through the first EOS, inclusive
    state: Int[
        np.ndarray, "S T"
    ]  # the prefix that each token follows, in [0, P); 0 behind the mask
    vocab: int  # V, EOS included

    @property
    def prefixes(self) -> int:
        """P: the prefixes of fewer than T tokens that have no EOS."""
        return int(self.state.max()) + 1

    @property
    def eos(self) -> int:
        """The last token of the vocabulary."""
        return self.vocab - 1

    @property
    def length(self) -> Int[np.ndarray, "S"]:
        """Tokens of each answer, EOS included."""
        return self.mask.sum(1)

    @property
    def truncated(self) -> Bool[np.ndarray, "S"]:
        """Which answers have no EOS within T tokens."""
        return ~((self.tokens == self.eos) & self.mask).any(1)


def enumerate_tree(vocab: int, depth: int) -> Tree:
    """Every answer of at most `depth` tokens out of `vocab` >= 2, the last of which is EOS.

    With n = vocab - 1 there are 1 + n + ... + n^depth of them, and a term fewer of prefixes. The
    answers go from short to long, the prefixes in lexicographic order. Raises ValueError for a
    vocabulary without another token than EOS, or a depth below 1.
    """
    if vocab < 2 or depth < 1:
        raise ValueError(f"a tree needs vocab >= 2 and depth >= 1, got {vocab} and {depth}")
    eos = vocab - 1
    words: list[tuple[int, ...]] = [
        (*word, eos) for size in range(depth) for word in product(range(eos), repeat=size)
    ]
    words.extend(product(range(eos), repeat=depth))
    tokens = np.full((len(words), depth), eos, np.int32)
    mask = np.zeros(tokens.shape, bool)
    state = np.zeros(tokens.shape, np.int32)
    prefixes = sorted({word[:place] for word in words for place in range(len(word))})
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    for row, word in enumerate(words):
        for place, token in enumerate(word):
            tokens[row, place], mask[row, place] = token, True
            state[row, place] = number[word[:place]]
    return Tree(tokens, mask, state, vocab)


def init(tree: Tree, key: Key[Array, ""], *, spread: float, dtype: jnp.dtype) -> Params:
    """A random policy: independent normal logits of standard deviation `spread`."""
    return {"logits": spread * jax.random.normal(key, (tree.prefixes, tree.vocab), dtype)}


def logps(params: Params, tree: Tree) -> Float[Array, "S T"]:
    """Log-probability (nats) of each token of each answer; 0 behind the mask."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    return jnp.where(tree.mask, table[tree.state, tree.tokens], 0)


def entropies(params: Params, tree: Tree) -> Float[Array, "S T"]:
    """Entropy (nats) of the distribution that each token is drawn from; 0 behind the mask."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    return jnp.where(tree.mask, -jnp.sum(jnp.exp(table) * table, axis=-1)[tree.state], 0)


def probabilities(params: Params, tree: Tree) -> Float[Array, "S"]:
    """The probability of each answer; they add up to 1."""
    return jnp.exp(logps(params, tree).sum(1))


def expected_reward(params: Params, tree: Tree, reward: Float[Array, "S"]) -> Float[Array, ""]:
    """J, the sum of probability times reward over all answers."""
    return jnp.sum(probabilities(params, tree) * reward)


def policy_gradient(params: Params, tree: Tree, reward: Float[Array, "S"]) -> Params:
    """The gradient of J itself, which estimators from samples are to be compared with."""
    return jax.grad(expected_reward)(params, tree, reward)
