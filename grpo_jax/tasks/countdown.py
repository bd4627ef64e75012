"""Countdown: reach a target from given numbers with + - * / (the numbers game of the TV show).

The task of Stream of Search (Gandhi et al. 2024, arXiv:2404.03683) and TinyZero
(github.com/Jiayi-Pan/TinyZero), made here instead of read. A puzzle is built from a random
expression over its numbers whose every intermediate result is a positive integer, so it has a
solution. The check, `grpo_jax.rewards.countdown`, takes any expression that keeps to the rules.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo_jax.tasks.base import Prompt, Task, stream
from grpo_jax.tasks.prompts import Problem, Style, make_prompt, right_completion, style_of

_HELDOUT_SHARE = 5  # one puzzle in so many is held out
_HELDOUT_KEY, _SHOWN_KEY = 2**63 + 1, 2**63 + 2  # streams of their own: the same for every seed
_TRIES = 10_000  # random expressions for one puzzle before giving up

_BLOCKS = ("xml", "r1")  # styles of prompts.py that ask for an <answer> block
# Few-shot lines for a base or small model: no reasons, an answer ends with its line.
_LINE = Style(
    chat=False,
    before="Numbers: ",
    after=". Answer:",
    begin=" ",
    between="\n",
    stops=("\n",),
    fewest=1,
)


@dataclass(frozen=True)
class _Rules:
    low: int
    high: int
    target_low: int
    target_high: int
    operators: str
    use_all: bool


@dataclass(frozen=True)
class _Puzzle:
    numbers: tuple[int, ...]
    target: int
    solution: str  # one of its right expressions
    steps: str  # "3 * 7 = 21", a line for each operation of it

    @property
    def key(self) -> str:
        """What makes two puzzles the same one: the order of the numbers doesn't matter."""
        return f"{sorted(self.numbers)}{self.target}"


def countdown(
    k_min: int = 3,
    k_max: int = 4,
    low: int = 1,
    high: int = 99,
    target_low: int = 10,
    target_high: int = 99,
    operators: str = "+-*/",
    use_all: bool = True,
    style: str = "xml",
    shots: int = 1,
    heldout: int = 128,
) -> Task:
    """The task; training never ends and never shows a held-out puzzle.

    Args:
        k_min: fewest numbers in a puzzle, at least 2; k is uniform on [k_min, k_max].
        k_max: most numbers.
        low: smallest number, at least 1; numbers are uniform on [low, high], repeats included.
        high: largest number.
        target_low: smallest target, at least 1.
        target_high: largest target.
        operators: those of + - * / that may be used.
        use_all: each number must be used exactly once; False: at most once.
        style: "line" (few-shot text without reasons), or one of `grpo_jax.tasks.prompts` that asks
            for an `<answer>` block: "xml" (chat), "r1".
        shots: solved puzzles shown first, which are not trained on.
        heldout: number of held-out puzzles, all different, the values of k taking turns.

    `level` is k. The columns are what `grpo_jax.rewards.countdown` asks for, and a `solution`.

    Raises ValueError for values out of range, and where puzzles of that kind are too rare.
    """
    if not 2 <= k_min <= k_max:
        raise ValueError(f"need 2 <= k_min <= k_max, got {k_min} and {k_max}")
    if not (1 <= low <= high and 1 <= target_low <= target_high):
        raise ValueError(
            f"need 1 <= low <= high, got {low} and {high}, and 1 <= target_low <= target_high, "
            f"got {target_low} and {target_high}"
        )
    if not operators or not set(operators) <= set("+-*/"):
        raise ValueError(f"operators are some of +-*/, got {operators!r}")
    rules = _Rules(low, high, target_low, target_high, operators, use_all)
    template = _template(style, shots)
    rng = stream(_SHOWN_KEY, 0)
    shown = tuple(_draw(rng, k_min + i % (k_max - k_min + 1), rules) for i in range(shots))
    make = partial(_prompt, rules=rules, template=template, shown=shown)
    return Task(
        name="countdown",
        train=partial(_train, k_min=k_min, k_max=k_max, rules=rules, shown=shown, make=make),
        train_size=None,
        heldout=tuple(make(puzzle) for puzzle in _heldout(heldout, k_min, k_max, rules)),
        stop_strings=template.stops,
        right=partial(_right, template=template),
    )


def _template(style: str, shots: int) -> Style:
    if style == "line":
        if shots < _LINE.fewest:
            raise ValueError(f"style 'line' needs shots >= {_LINE.fewest}, got {shots}")
        return _LINE
    if style not in _BLOCKS:
        raise ValueError(f"style {style!r} is none of countdown's: line, {', '.join(_BLOCKS)}")
    return style_of(style, shots)


def _random_puzzle(rng: np.random.Generator, k: int, rules: _Rules) -> _Puzzle | None:
    """Numbers joined two at a time until one is left; None where no operator fits."""
    numbers = tuple(rng.integers(rules.low, rules.high + 1, size=k).tolist())
    parts = [(number, str(number), 3) for number in numbers]  # value, text, rank
    steps = []
    while len(parts) > 1:
        i, j = rng.permutation(len(parts))[:2].tolist()
        (a, left, left_rank), (b, right, right_rank) = parts[i], parts[j]
        fits = {"+": True, "-": a > b, "*": True, "/": a % b == 0}
        allowed = [operator for operator in rules.operators if fits[operator]]
        if not allowed:
            return None
        operator = allowed[rng.integers(len(allowed))]
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator]
        rank = 1 if operator in "+-" else 2
        if left_rank < rank:
            left = f"({left})"
        if right_rank < rank or (right_rank == rank and operator in "-/"):
            right = f"({right})"
        steps.append(f"{a} {operator} {b} = {value}")
        kept = [part for at, part in enumerate(parts) if at not in (i, j)]
        parts = [*kept, (value, f"{left} {operator} {right}", rank)]
    ((target, solution, _),) = parts
    return _Puzzle(numbers, target, solution, "\n".join(steps))


def _draw(
    rng: np.random.Generator,
    k: int,
    rules: _Rules,
    without: Sequence[_Puzzle] = (),
    *,
    heldout: bool = False,
) -> _Puzzle:
    """A puzzle of k numbers on the wanted side of the split, and none of `without`."""
    taken = {puzzle.key for puzzle in without}
    for _ in range(_TRIES):
        puzzle = _random_puzzle(rng, k, rules)
        if (
            puzzle is not None
            and rules.target_low <= puzzle.target <= rules.target_high
            # without the rule to use all numbers, a target among them is no puzzle
            and (rules.use_all or puzzle.target not in puzzle.numbers)
            and _is_heldout(puzzle.key) == heldout
            and puzzle.key not in taken
        ):
            return puzzle
    raise ValueError(
        f"countdown: none of {_TRIES} random expressions of {k} numbers makes a new puzzle by "
        "these rules; widen the ranges, or hold out fewer"
    )


def _is_heldout(key: str) -> bool:
    """Whether a puzzle belongs to the held-out fifth, by a hash: the same for every seed."""
    mixed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big") % _HELDOUT_SHARE == 0


def _train(
    position: int,
    seed: int,
    *,
    k_min: int,
    k_max: int,
    rules: _Rules,
    shown: Sequence[_Puzzle],
    make: Callable[[_Puzzle], Prompt],
) -> Prompt:
    rng = stream(seed, position)
    return make(_draw(rng, int(rng.integers(k_min, k_max + 1)), rules, shown))


def _heldout(n: int, k_min: int, k_max: int, rules: _Rules) -> list[_Puzzle]:
    rng = stream(_HELDOUT_KEY, 0)
    found: list[_Puzzle] = []
    for i in range(n):
        k = k_min + i % (k_max - k_min + 1)
        found.append(_draw(rng, k, rules, found, heldout=True))
    return found


def _prompt(puzzle: _Puzzle, *, rules: _Rules, template: Style, shown: Sequence[_Puzzle]) -> Prompt:
    examples = [
        Problem(_question(p, rules, template), p.solution, "" if template == _LINE else p.steps)
        for p in shown
    ]
    columns: dict[str, object] = {
        "numbers": puzzle.numbers,
        "operators": rules.operators,
        "use_all": rules.use_all,
        "tagged": template != _LINE,
        "solution": puzzle.solution,
    }
    asked = Problem(
        _question(puzzle, rules, template),
        str(puzzle.target),
        level=len(puzzle.numbers),
        columns=columns,
    )
    return make_prompt(asked, template, examples)


def _question(puzzle: _Puzzle, rules: _Rules, template: Style) -> str:
    numbers = ", ".join(map(str, puzzle.numbers))
    if template == _LINE:
        return f"{numbers}. Target: {puzzle.target}"
    use = (
        "must use each number exactly once" if rules.use_all else "may use each number at most once"
    )
    return (
        f"Using the numbers {numbers}, write an arithmetic expression that equals {puzzle.target}. "
        f"You {use}, with the operators {' '.join(rules.operators)} and parentheses. Give the "
        "expression alone as the answer."
    )


def _right(prompt: Prompt, *, template: Style) -> str:
    """A right completion; one whose "= target" gives it away where `prompt` has another answer."""
    text = f"{prompt.columns['solution']} = {prompt.answer}"
    return f"{_LINE.begin}{text}" if template == _LINE else right_completion(text, template)
