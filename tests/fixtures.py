"""What the tests of the training path share: two small models, prompts, a task, a scripted sampler.

Plain functions, cached where they are slow. `finite_task`, `digits` and `flat` are also named in
configurations (`task._target_=tests.fixtures.finite_task`).
"""

from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import tokenizer
from grpo_jax.generate import given_rollout
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Prompt, Shuffled, Task
from grpo_jax.types import Batch, Rollout, TrainState

VOCAB, SLOTS, TOKENS = 40, 6, 10  # of the small Llama and what is sampled from it
PROMPTS = ([5, 9, 11], [8], [4, 6, 12, 13, 30], [20, 21])  # token ids, of several lengths
characters = cache(tokenizer.char_tokenizer)


# ------------------------------------------------------------------------------------- models


@cache
def small_llama() -> tuple[llama.Model, dict]:
    """A random Llama with grouped queries, and parameters; the logits' deviation is about 1."""
    config = LlamaConfig(VOCAB, 16, 1, 4, 2, 4, 16)
    model = llama.build(config)
    return model, jax.jit(model.init)(jax.random.key(0))


def bigram(dtype: str = "float32") -> llama.Model:
    """A model whose next token depends on the last one only: quick to compile, easy to reckon.

    hidden = embed[token]; with `table(logits)` as parameters, the logits after token i are row i.
    """

    def embed(params, token):
        return params["embed"]["embedding"].astype(dtype)[token]

    return llama.Model(
        config=None,
        init=lambda key: table(jax.random.normal(key, (VOCAB, VOCAB))),
        hidden=lambda params, tokens, mask: embed(params, tokens),
        answers=lambda params, prompt, mask, completion: embed(
            params,
            jnp.concatenate(
                [prompt[:, -1:].repeat(len(completion) // len(prompt), 0), completion[:, :-1]], 1
            ),
        ),
        prefill=lambda params, tokens, mask: (embed(params, tokens[:, -1]), ()),
        unstack=lambda params: params,
        decode=lambda params, token, position, prompts, mask, cache, column, visible: (
            embed(params, token),
            cache,
        ),
        select=lambda cache, prompts: cache,
        empty_cache=lambda rows, slots: (),
        head=lambda params: params["head"]["embedding"],
    )


def table(logits) -> dict:
    """The bigram's parameters for `logits` [V, V], a row for each last token."""
    logits = jnp.asarray(logits, jnp.float32)
    return {"embed": {"embedding": jnp.eye(len(logits))}, "head": {"embedding": logits.T}}


def certain(**follows: str) -> np.ndarray:
    """Logits [83, 83] over characters: after `a` comes `follows["a"]` surely, else EOS.

    The key `colon` stands for ":", `mark` for "?".
    """
    words = characters()
    logits = np.full((words.vocab_size, words.vocab_size), -50.0)
    logits[:, words.eos_ids[0]] = 0.0
    for name, after in follows.items():
        (last,) = words.encode({"colon": ":", "mark": "?"}.get(name, name))
        logits[last, words.eos_ids[0]] = -50.0
        logits[last, words.encode(after)] = 0.0
    return logits


# ------------------------------------------------------------------------------ learner's data


def make_batch(prompts: int = 4, group: int = 2, seed: int = 0, vocab: int = VOCAB) -> Batch:
    """Random rows of uneven lengths (1 to 6 tokens); the last row is not kept."""
    rng = np.random.default_rng(seed)
    B, T = prompts * group, 6
    length = rng.integers(1, T + 1, B)
    mask = np.arange(T) < length[:, None]
    rollout = Rollout(
        prompt=rng.integers(0, vocab, (B, 3)).astype(np.int32),
        prompt_mask=np.ones((B, 3), bool),
        completion=rng.integers(0, vocab, (B, T)).astype(np.int32),
        mask=mask,
        sampler_logp=np.where(mask, -rng.exponential(3.0, (B, T)), 0).astype(np.float32),
        truncated=np.zeros(B, bool),
        version=np.zeros(B, np.int32),
    )
    return Batch(
        rollout=jax.tree.map(jnp.asarray, rollout),
        advantage=jnp.asarray(rng.normal(0, 1, B), jnp.float32),
        old_logp=jnp.asarray(-rng.exponential(3.0, (B, T)), jnp.float32),
        ref_logp=jnp.asarray(-rng.exponential(3.0, (B, T)), jnp.float32),
        keep=jnp.arange(B) < B - 1,
        group=jnp.repeat(jnp.arange(prompts), group),
    )


def make_state(params, optimizer) -> TrainState:
    """A state of its own: updates donate it, so the arrays are copied."""
    params = jax.tree.map(jnp.copy, params)
    return TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key(0))


# ------------------------------------------------------------------------------ prompts, rewards


def numbered(position: int, seed: int) -> Prompt:
    """Prompt "position:"; its answer is 1."""
    return Prompt(f"{position}:", "1")


def make_task(**changes) -> Task:
    """An endless stub; held out are the prompts "a:" to "e:", whose answer is 1."""
    heldout = tuple(Prompt(f"{c}:", "1", level="ab" if c in "ab" else "cde") for c in "abcde")
    fields = {"name": "stub", "train": numbered, "train_size": None, "heldout": heldout}
    return Task(**{**fields, **changes})


def finite_task(size: int = 3) -> Task:
    """`size` training prompts of different lengths."""
    prompts = tuple(Prompt("a" * (i + 1) + ":", "1") for i in range(size))
    return make_task(train=Shuffled(prompts), train_size=size, chance=0.1)


def correct(completion: str, answer: str) -> float | None:
    """1 or 0; "x" can't be scored, and "*" is a mistake of the scorer."""
    if completion == "*":
        raise ValueError("a bad day")
    return None if completion == "x" else float(completion == answer)


def digits(completion: str, answer: str) -> float:
    """Share of digits among the first characters: a reward that a random policy earns some of."""
    return sum(c.isdigit() for c in completion) / 8


def flat(completion: str, answer: str) -> float:
    """The same for everybody."""
    return 0.5


CORRECT = RewardPart("correct", correct)


class Scripted:
    """A sampler that says what it is told: one list of texts a call, the last one for ever.

    A text ends with EOS unless it ends with "~" (which is not said): that one was cut off.
    """

    def __init__(self, *calls: Sequence[str], slots: int = 8, logp: float = -1.0):
        self.calls, self.slots, self.logp = [list(call) for call in calls], slots, logp
        self.prompts: list[list[str]] = []
        self.row_ids: list[list[int]] = []
        self.keys: list[jax.Array] = []
        self.temperatures: list[float] = []
        self.version = 0

    def load(self, params, version):
        self.version = version

    def sample(self, prompts, row_ids, params, key):
        texts = self.calls[min(len(self.prompts), len(self.calls) - 1)]
        assert len(texts) == len(row_ids)
        words = characters()
        self.prompts.append([words.decode(ids) for ids in prompts])
        self.row_ids.append(list(row_ids))
        self.keys.append(key)
        self.temperatures.append(params.temperature)
        ids = [
            words.encode(text[:-1])
            if text.endswith("~")
            else [*words.encode(text), words.eos_ids[0]]
            for text in texts
        ]
        group = len(row_ids) // len(prompts)
        repeated = [prompt for prompt in prompts for _ in range(group)]
        rollout = given_rollout(repeated, ids, self.slots, self.slots, words.pad_id)
        fields = {
            "sampler_logp": np.where(rollout.mask, self.logp, 0).astype(np.float32),
            "truncated": np.array([text.endswith("~") for text in texts]),
            "version": np.full(len(texts), self.version, np.int32),
        }
        return Rollout(**{**vars(rollout), **fields})


def constant_logprobs(params, rollout, group=1):
    """Stands in for the log-prob pass: every token has `params["logp"]`, every entropy is 2."""
    shape = rollout.completion.shape
    return jnp.full(shape, params["logp"]), jnp.full(shape, 2.0)


def constant_exact_kl(params, reference, rollout, group=1):
    """Stands in for the pass of `kl=exact`: every KL is the difference of the numbers."""
    return jnp.full(rollout.completion.shape, params["logp"] - reference["logp"])


def assert_trees_equal(a, b, **tolerance):
    """Bit for bit, or to `atol` and `rtol`."""
    check = np.testing.assert_array_equal
    if tolerance:
        check = partial(np.testing.assert_allclose, **tolerance)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: check(np.asarray(x), np.asarray(y)), a, b)


def snapshot(tree):
    """Copies in host memory, keys as their words: a donated array can't be read later."""

    def leaf(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(leaf, tree)
