"""The strict check of the embedded task `chain` (grpo_jax/tasks/chain.py): every step counts."""

from collections.abc import Sequence
from itertools import accumulate
from string import ascii_lowercase


def worked(digits: Sequence[int]) -> str:
    """The right steps for `digits`: label, copied digit and running maximum, from label b on.

    >>> worked([6, 3, 7])
    'b36c77'
    """
    running = accumulate(digits, max)
    steps = list(zip(ascii_lowercase, digits, running, strict=False))
    return "".join(f"{label}{digit}{maximum}" for label, digit, maximum in steps[1:])


def correct(completion: str, answer: str, *, digits: Sequence[int], truncated: bool) -> float:
    """1.0 if the whole text is the right steps, any number of dots, `=` and the answer; else 0.0.

    The last digit alone is not enough: a maximum forgives early slips, and a policy that is paid
    for the last digit only decays into junk steps. A text that was cut off scores 0.0.
    """
    head = worked(digits)
    if truncated or not completion.startswith(head):
        return 0.0
    return float(completion[len(head) :].lstrip(".") == f"={answer}")
