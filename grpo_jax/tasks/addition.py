"""One-digit addition as few-shot raw text: the smallest task for a pretrained model.

Answers take a few tokens, and the newline that ends them is part of the right text, so
P(right) has a closed form: `exact_text` under teacher forcing.
"""

from itertools import product

from grpo_jax.tasks.base import Prompt, Shuffled, Task

_SHOTS = "2+3=5\n4+1=5\n7+2=9\n"


def addition() -> Task:
    """All 100 sums a+b, 0 <= a, b <= 9, each after the same three solved ones.

    Held-out is the whole population, so accuracy there is a train-set measure: how far the policy
    has learned the sums that it practises, not whether it generalises. The three solved sums are
    in it too. `level` tells the sums with a carry (two-digit answers) from the rest. `chance` is
    that of naming one of the 19 possible sums at random.
    """
    prompts = tuple(_prompt(a, b) for a, b in product(range(10), repeat=2))
    return Task(
        name="addition",
        train=Shuffled(prompts),
        train_size=len(prompts),
        heldout=prompts,
        stop_strings=("\n",),
        chance=1 / 19,
        exact_text=exact_text,
    )


def exact_text(prompt: Prompt) -> str:
    """The one right completion: the sum and the newline that ends the line."""
    return f"{prompt.answer}\n"


def _prompt(a: int, b: int) -> Prompt:
    level = "carry" if a + b >= 10 else "no_carry"
    return Prompt(f"{_SHOTS}{a}+{b}=", str(a + b), level=level)
