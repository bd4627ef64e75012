"""One-digit addition: the smallest task for a pretrained model, as few-shot raw text or as a chat.

Raw answers take a few tokens, and the newline that ends them is part of the right text, so
P(right) has a closed form: `exact_text` under teacher forcing. The chat asks for the article's XML
format instead (`prompts.STYLES["xml"]`), which small models have to learn first.
"""

from itertools import product

from grpo_jax.tasks.base import Prompt, Shuffled, Task
from grpo_jax.tasks.prompts import STYLES, Problem, make_prompt, right_completion

_SOLVED = ((2, 3), (4, 1), (7, 2))


def addition(style: str = "raw", shots: int = 3) -> Task:
    """All 100 sums a+b, 0 <= a, b <= 9, each after the same solved ones.

    Args:
        style: "raw", lines such as 2+3=5, or "xml", a chat with the article's system prompt.
        shots: solved sums shown first, up to 3; in a chat they are earlier turns. SmolLM2 writes no
            tag at all without one.

    Held-out is the whole population, so accuracy there is a train-set measure: how far the policy
    has learned the sums that it practises, not whether it generalises. The solved sums are in it
    too. `level` tells the sums with a carry (two-digit answers) from the rest. `chance` of the raw
    style is that of naming one of the 19 possible sums at random.

    Raises ValueError for another style or number of shots.
    """
    if style not in ("raw", "xml"):
        raise ValueError(f"unknown style {style!r}; there are raw, xml")
    if not 0 <= shots <= len(_SOLVED):
        raise ValueError(f"shots={shots}: there are {len(_SOLVED)} solved sums")
    make = {"raw": _raw_prompt, "xml": _chat_prompt}[style]
    prompts = tuple(make(a, b, shots) for a, b in product(range(10), repeat=2))
    raw = style == "raw"
    return Task(
        name="addition",
        train=Shuffled(prompts),
        train_size=len(prompts),
        heldout=prompts,
        stop_strings=("\n",) if raw else (),
        chance=1 / 19 if raw else None,
        exact_text=exact_text if raw else None,
        right=None if raw else _right,
    )


def exact_text(prompt: Prompt) -> str:
    """The one right completion: the sum and the newline that ends the line."""
    return f"{prompt.answer}\n"


def _raw_prompt(a: int, b: int, shots: int) -> Prompt:
    lines = "".join(f"{x}+{y}={x + y}\n" for x, y in _SOLVED[:shots])
    return Prompt(f"{lines}{a}+{b}=", str(a + b), level=_level(a, b))


def _chat_prompt(a: int, b: int, shots: int) -> Prompt:
    shown = [_problem(x, y) for x, y in _SOLVED[:shots]]
    return make_prompt(_problem(a, b), STYLES["xml"], shown)


def _problem(a: int, b: int) -> Problem:
    total = str(a + b)
    return Problem(f"What is {a}+{b}?", total, f"{a} + {b} = {total}", level=_level(a, b))


def _right(prompt: Prompt) -> str:
    return right_completion(prompt.answer, STYLES["xml"])


def _level(a: int, b: int) -> str:
    return "carry" if a + b >= 10 else "no_carry"
