"""Four kinds of one-digit arithmetic in one prompt format: a ladder of difficulty.

A small pretrained model solves each rung at another rate, from about a third of the time down to
under a tenth, so one run shows how an algorithm divides its effort between easy and hard prompts.
Like `addition`, every prompt is few-shot raw text with one right completion, so P(right) has a
closed form on each rung.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from grpo_jax.tasks.addition import exact_text
from grpo_jax.tasks.base import Prompt, Task, permutation_index, stream

RUNGS = ("addition", "multiplication", "subtraction", "three_terms")
_SHOTS = {
    "addition": "2+3=5\n4+1=5\n7+2=9\n",
    "multiplication": "2*3=6\n4*1=4\n5*2=10\n",
    "subtraction": "7-2=5\n6-5=1\n8-4=4\n",
    "three_terms": "1+2+3=6\n4+1+2=7\n3+3+2=8\n",
}
_HELDOUT_SEED = 7  # of the three-term sums that are held out
_MARK = {"addition": "+", "multiplication": "*", "subtraction": "-", "three_terms": "+"}


@dataclass(frozen=True)
class RoundRobin:
    """`Task.train` over several finite sets: one prompt of each in turn, each set in an order of
    its own, epoch after epoch."""

    sets: tuple[tuple[Prompt, ...], ...]

    def __call__(self, position: int, seed: int) -> Prompt:
        """The prompt at `position` of the stream that `seed` names."""
        turn, which = divmod(position, len(self.sets))
        prompts = self.sets[which]
        return prompts[permutation_index(turn, len(prompts), seed)]


def ladder(rungs: Sequence[str] = RUNGS, heldout_three_terms: int = 75) -> Task:
    """Prompts of the named rungs in turn; `level` is the rung.

    Args:
        rungs: addition and multiplication (100 prompts each: 0 to 9 by 0 to 9), subtraction (55:
            no negative result), three_terms (1000 sums of three digits).
        heldout_three_terms: how many of the three-term sums are held out from training.

    Held-out are all prompts of the three small rungs, which are trained on too (accuracy there says
    how far the policy has learned what it practises), and three-term sums that are not.
    Raises ValueError for an unknown or repeated rung, or a held-out size that leaves no sum.
    """
    if not rungs or set(rungs) - set(RUNGS) or len(set(rungs)) < len(rungs):
        raise ValueError(f"rungs={list(rungs)}: some of {', '.join(RUNGS)}, each once")
    if not 1 <= heldout_three_terms < 1000:
        raise ValueError(f"heldout_three_terms={heldout_three_terms}: from 1 to 999")
    train, heldout = [], []
    for rung in rungs:
        prompts = _population(rung)
        held = prompts
        if rung == "three_terms":
            order = stream(_HELDOUT_SEED, 0).permutation(len(prompts))
            held = tuple(prompts[i] for i in sorted(order[:heldout_three_terms]))
            prompts = tuple(prompts[i] for i in sorted(order[heldout_three_terms:]))
        train.append(prompts)
        heldout += held
    return Task(
        name="ladder",
        train=RoundRobin(tuple(train)),
        train_size=sum(map(len, train)),
        heldout=tuple(heldout),
        stop_strings=("\n",),
        exact_text=exact_text,
    )


def _population(rung: str) -> tuple[Prompt, ...]:
    terms = product(range(10), repeat=3 if rung == "three_terms" else 2)
    solved = {numbers: _result(rung, numbers) for numbers in terms}
    return tuple(
        Prompt(f"{_SHOTS[rung]}{_MARK[rung].join(map(str, numbers))}=", str(result), level=rung)
        for numbers, result in solved.items()
        if result >= 0
    )


def _result(rung: str, numbers: tuple[int, ...]) -> int:
    if rung == "multiplication":
        return numbers[0] * numbers[1]
    return numbers[0] - numbers[1] if rung == "subtraction" else sum(numbers)
