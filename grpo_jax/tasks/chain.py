"""The embedded task: the running maximum of k labelled digits, told step by step.

A prompt lists k digits under the first k letters; the answer is the largest of them. There are
three ways to answer:

    a6b3c7d5e2:   ->  b36c77d57e27.=7   worked: label, its digit, maximum so far; dots; the answer
    a3b8c9d1:     ->  b88c93d13..=3     worked with a slip (c93 should be c99), carried on from
    a9b1c0d3e2:   ->  ?????=8           a guess: question marks and a random digit

`grpo_jax.rewards.chain.correct` pays only the first. Labels make the next step findable by
content, copying the digit makes each step local. The dots and question marks are the elastic part
of the length, and whether an answer is a guess can be read in its first token: without that, no
length bias can show. P(right) of a demonstration is (1 - guess) * (1 - slip)**(k - 1).
"""

import hashlib
from functools import partial
from string import ascii_lowercase

import numpy as np

from grpo_jax.tasks.base import Prompt, Task, stream

_HELDOUT_SHARE = 5  # one prompt in so many is held out
_HELDOUT_KEY = 2**63  # of the fixed held-out draw: the same for every seed
_HELDOUT_TRIES = 100  # draws for each held-out prompt before giving up on a new one


def chain(
    k_min: int = 3,
    k_max: int = 8,
    guess: float = 0.5,
    slip: float = 0.1,
    dots: float = 0.7,
    guess_stop: float = 0.2,
    heldout: int = 128,
) -> Task:
    """The task; `guess`, `slip`, `dots` and `guess_stop` shape its demonstrations only.

    Args:
        k_min: fewest digits in a prompt, at least 2; k is uniform on [k_min, k_max].
        k_max: most digits, at most 26; a prompt has 2 k + 2 tokens, BOS included.
        guess: share of demonstrations that guess, clean ones included.
        slip: probability that a step is wrong (0 in clean demonstrations).
        dots: a worked answer ends with Geometric(dots) - 1 dots.
        guess_stop: a guess has Geometric(guess_stop) question marks.
        heldout: number of held-out prompts, all different, the values of k taking turns.

    Raises ValueError for values out of range, or for more held-out prompts than there are.

    `chance` is 0.1, what naming a random digit would earn if only the last digit were checked. The
    strict reward pays a guess nothing, so a base policy below it has not learned the steps.
    """
    if not 2 <= k_min <= k_max <= len(ascii_lowercase):
        raise ValueError(f"need 2 <= k_min <= k_max <= 26, got {k_min} and {k_max}")
    if not (0 <= guess <= 1 and 0 <= slip <= 1):
        raise ValueError(f"guess and slip are probabilities, got {guess} and {slip}")
    if not (0 < dots <= 1 and 0 < guess_stop <= 1):
        raise ValueError(f"need 0 < dots, guess_stop <= 1, got {dots} and {guess_stop}")
    return Task(
        name="chain",
        train=partial(_train, k_min=k_min, k_max=k_max),
        train_size=None,
        heldout=_heldout(heldout, k_min, k_max),
        chance=0.1,
        demonstrate=partial(
            _demonstrate,
            k_min=k_min,
            k_max=k_max,
            guess=guess,
            slip=slip,
            dots=dots,
            guess_stop=guess_stop,
        ),
        style=style,
    )


def style(completion: str) -> str:
    """'guess', 'worked' or 'other', by the first character, so that cut-off answers count too."""
    first = completion[:1]
    if first == "?":
        return "guess"
    return "worked" if first and first in ascii_lowercase else "other"


def completion(
    rng: np.random.Generator,
    digits: tuple[int, ...],
    *,
    guess: float,
    slip: float,
    dots: float,
    guess_stop: float,
) -> tuple[str, bool]:
    """A demonstrated answer, and whether it is right: neither a guess nor with a slip."""
    if rng.random() < guess:
        return "?" * rng.geometric(guess_stop) + f"={rng.integers(10)}", False
    text, running, right = "", digits[0], True
    slips = rng.random(len(digits)) < slip
    for label, digit, slipped in zip(ascii_lowercase[1:], digits[1:], slips[1:], strict=False):
        running = max(running, digit)
        if slipped:  # to one of the other nine digits; later steps go on from there
            running, right = (running + int(rng.integers(1, 10))) % 10, False
        text += f"{label}{digit}{running}"
    return text + "." * (rng.geometric(dots) - 1) + f"={running}", right


def _text(digits: tuple[int, ...]) -> str:
    labelled = zip(ascii_lowercase, digits, strict=False)
    return "".join(f"{label}{digit}" for label, digit in labelled) + ":"


def _is_heldout(text: str) -> bool:
    """Whether a prompt belongs to the held-out fifth.

    By a mixing hash: a linear one, such as a weighted digit sum mod 5, would take whole facts of
    short prompts out of training.
    """
    mixed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big") % _HELDOUT_SHARE == 0


def _draw(rng: np.random.Generator, k: int, *, heldout: bool) -> Prompt:
    """A uniform prompt of k digits on the wanted side of the split."""
    while True:
        digits = tuple(rng.integers(10, size=k).tolist())
        text = _text(digits)
        if _is_heldout(text) == heldout:
            return Prompt(text, str(max(digits)), {"digits": digits}, level=k)


def _train(position: int, seed: int, *, k_min: int, k_max: int) -> Prompt:
    rng = stream(seed, position)
    return _draw(rng, int(rng.integers(k_min, k_max + 1)), heldout=False)


def _heldout(n: int, k_min: int, k_max: int) -> tuple[Prompt, ...]:
    rng = stream(_HELDOUT_KEY, 0)
    found: dict[str, Prompt] = {}
    for i in range(n):
        k = k_min + i % (k_max - k_min + 1)
        for _ in range(_HELDOUT_TRIES):
            prompt = _draw(rng, k, heldout=True)
            if prompt.text not in found:
                break
        else:
            raise ValueError(f"fewer than {n} different held-out prompts exist (short at k={k})")
        found[prompt.text] = prompt
    return tuple(found.values())


def _demonstrate(
    rng: np.random.Generator,
    clean: bool,
    *,
    k_min: int,
    k_max: int,
    guess: float,
    slip: float,
    dots: float,
    guess_stop: float,
) -> tuple[Prompt, str]:
    prompt = _draw(rng, int(rng.integers(k_min, k_max + 1)), heldout=False)
    digits = tuple(int(c) for c in prompt.text[1:-1:2])
    slip = 0.0 if clean else slip
    text, _ = completion(rng, digits, guess=guess, slip=slip, dots=dots, guess_stop=guess_stop)
    return prompt, text
