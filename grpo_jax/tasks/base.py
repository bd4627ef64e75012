"""What a task is: prompts by position, a fixed held-out set, and the order between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One question.

    A raw prompt is `text`, tokenised as it is. A chat prompt carries `messages`, which are what is
    tokenised; its `text` is the question alone, for logs.
    """

    text: str
    answer: str  # the gold answer, as rewards get it
    columns: dict[str, object] = field(default_factory=dict)  # what else a reward may ask for
    level: int | str | None = None  # difficulty, for metrics by level
    messages: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Task:
    """Prompts, and what is known about their answers."""

    name: str
    train: Callable[[int, int], Prompt]  # (position, seed) -> prompt; stateless, deterministic
    train_size: int | None  # None: endless, no prompt is bound to come twice
    heldout: tuple[Prompt, ...]
    stop_strings: tuple[str, ...] = ()  # an answer ends with the token that contains one
    chance: float | None = None  # pass rate of a blind guess; None: unknown
    # (rng, clean) -> a prompt and a completion to imitate; clean ones hold no slips
    demonstrate: Callable[[np.random.Generator, bool], tuple[Prompt, str]] | None = None
    style: Callable[[str], str] | None = None  # completion -> label, for metrics by style
    exact_text: Callable[[Prompt], str] | None = None  # the one right completion, if only one is
    # a completion that answers as the prompt asks, with the gold: what a fitting reward pays for
    right: Callable[[Prompt], str] | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows left out at load


class PromptTokenizer(Protocol):
    """The part of `grpo_jax.tokenizer.Tokenizer` that prompts need."""

    @property
    def adds_bos(self) -> bool:
        """Whether raw text is to start with BOS."""

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of raw text."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation, open for the assistant's turn."""


def stream(seed: int, counter: int) -> np.random.Generator:
    """An independent generator for each (seed, counter), both in [0, 2**64): no state to save."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, counter], np.uint64)))


def permutation_index(position: int, size: int, seed: int) -> int:
    """The row of a finite data set at `position` (prompts consumed so far), in [0, size).

    Each epoch of `size` positions is a permutation of its own, drawn from (seed, epoch), so the
    one integer is all that a resumed run needs. A batch may straddle epochs or exceed the data.
    Raises ValueError if `size` < 1 or `position` < 0.
    """
    if size < 1 or position < 0:
        raise ValueError(f"need size >= 1 and position >= 0, got {size} and {position}")
    epoch, offset = divmod(position, size)
    return int(_permutation(size, seed, epoch)[offset])


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return stream(seed, epoch).permutation(size)


@dataclass(frozen=True)
class Shuffled:
    """`Task.train` over finite data: epoch after epoch, each in an order of its own."""

    prompts: tuple[Prompt, ...]

    def __call__(self, position: int, seed: int) -> Prompt:
        """The prompt at `position` of the stream that `seed` names."""
        return self.prompts[permutation_index(position, len(self.prompts), seed)]


def prompt_ids(prompt: Prompt, tokenizer: PromptTokenizer) -> list[int]:
    """Token ids of a prompt, not padded; a raw one starts with BOS where the tokenizer says so."""
    if prompt.messages is not None:
        return tokenizer.chat(prompt.messages)
    return tokenizer.encode(prompt.text, bos=tokenizer.adds_bos)


def drop_long(
    prompts: Sequence[Prompt], tokenizer: PromptTokenizer, limit: int
) -> tuple[tuple[Prompt, ...], int]:
    """The prompts of at most `limit` tokens, and how many were longer. None is ever cut."""
    kept = tuple(p for p in prompts if len(prompt_ids(p, tokenizer)) <= limit)
    return kept, len(prompts) - len(kept)


def within_limit(task: Task, tokenizer: PromptTokenizer, limit: int) -> Task:
    """`task` without its prompts of more than `limit` tokens, which `dropped` then counts.

    Endless training prompts can't be listed, so only the held-out ones are looked at there.
    Raises ValueError if no training or no held-out prompt is left.
    """
    heldout, long_heldout = drop_long(task.heldout, tokenizer, limit)
    dropped = task.dropped | {"heldout_too_long": long_heldout}
    train, train_size = task.train, task.train_size
    if isinstance(train, Shuffled):
        prompts, long_train = drop_long(train.prompts, tokenizer, limit)
        train, train_size = Shuffled(prompts), len(prompts)
        dropped["train_too_long"] = long_train
    if not heldout or train_size == 0:
        raise ValueError(f"every prompt of task {task.name!r} is longer than {limit} tokens")
    return replace(task, train=train, train_size=train_size, heldout=heldout, dropped=dropped)


def longest_prompt(task: Task, tokenizer: PromptTokenizer) -> int | None:
    """Tokens of the longest prompt, held-out ones included; None for an endless task."""
    if not isinstance(task.train, Shuffled):
        return None
    return max(len(prompt_ids(p, tokenizer)) for p in (*task.train.prompts, *task.heldout))
