"""The check of Countdown (grpo_jax/tasks/countdown.py): an expression, its numbers and its value.

What a model writes is hostile input, and nothing of it is evaluated by Python. TinyZero's reward
(github.com/Jiayi-Pan/TinyZero, verl/utils/reward_score/countdown.py) filters characters and calls
`eval`, so that `2**3`, `7//2` and 1.5 pass for uses of 2, 3, 7 and of 1 and 5; here they don't.

The grammar, around whose parts white space is free:

    answer      sum | sum = target        what stands behind "=" must be the target's digits
    sum         product { (+ | -) product }       a minus in front only at the very beginning or
    product     operand { (* | /) operand }       behind an opening parenthesis: -3 + 8, 2 * (-3)
    operand     digits | ( sum )

Digits are ASCII, at most 9 in a number; there are no decimals, exponents or other operators. The
signs U+2212, U+00D7 and U+00F7 read as -, * and /. Values are exact fractions: 8 / (3 - 8 / 3) is
24. Texts over 256 characters are no answers. The caps bound the value too, which has no more digits
than the text: a row costs well under a millisecond, and nothing recurses.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_jax.rewards.numeric import answer_blocks

MAX_CHARACTERS = 256
MAX_DIGITS = 9

_TOKEN = re.compile(r"[0-9]+|\S")  # whatever is no number is a token of one character
_SIGNS = str.maketrans("−×÷", "-*/")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True)
class Expression:
    """What a text says, if it is an expression."""

    value: Fraction
    numbers: tuple[int, ...]  # every number in it, in order
    operators: frozenset[str]  # of + - * /; a sign in front counts as -


def evaluate(text: str) -> Expression | None:
    """The expression that `text` as a whole is; None if it is not one or divides by zero.

    See the module's docstring for the grammar. Never raises for a string.

    >>> evaluate("8 / (3 - 8 / 3)").value
    Fraction(24, 1)
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    values: list[Fraction] = []
    waiting: list[str] = []  # operators and parentheses whose right end is still to come
    numbers: list[int] = []
    used: set[str] = set()
    before, operand_ended = "", False
    try:  # two stacks (Dijkstra's shunting yard); the outer parentheses close what is open
        for token in ["(", *_TOKEN.findall(text.translate(_SIGNS)), ")"]:
            if "0" <= token[0] <= "9" and not operand_ended and len(token) <= MAX_DIGITS:
                numbers.append(int(token))
                values.append(Fraction(int(token)))
                operand_ended = True
            elif token == "(" and not operand_ended:
                waiting.append(token)
            elif token == ")" and operand_ended:
                while waiting[-1] != "(":
                    _apply(waiting.pop(), values)
                waiting.pop()
            elif token in _RANK and (operand_ended or (token == "-" and before == "(")):
                if not operand_ended:  # a sign in front: what follows is taken from zero
                    values.append(Fraction(0))
                while _RANK.get(waiting[-1], 0) >= _RANK[token]:
                    _apply(waiting.pop(), values)
                waiting.append(token)
                used.add(token)
                operand_ended = False
            else:
                return None
            before = token
    except (IndexError, ZeroDivisionError):  # a parenthesis that nothing opened
        return None
    return None if waiting else Expression(values[0], tuple(numbers), frozenset(used))


def correct(
    completion: str,
    answer: str,
    *,
    numbers: Sequence[int],
    operators: str,
    use_all: bool,
    tagged: bool,
    truncated: bool,
) -> float | None:
    """1.0 if the answer is an expression by the rules whose value is the target, else 0.0.

    Args:
        completion: where `tagged`, its `<answer>` blocks are the answers: at least one, all closed,
            and all must be right. Otherwise all of it is, unless it was cut off.
        answer: the target in digits; None (unscorable) is returned if it is something else.
        numbers: what may be used, each once.
        operators: those of + - * / that may be used.
        use_all: whether each number must be used.
        tagged: whether answers stand in blocks.
        truncated: whether the completion was cut off by the budget.
    """
    if not re.fullmatch("[0-9]+", answer):
        return None
    texts = _answers(completion, tagged, truncated)
    found = [_legal(text, answer, numbers, operators, use_all) for text in texts]
    target = Fraction(int(answer))
    return float(bool(found) and all(e is not None and e.value == target for e in found))


def legal(
    completion: str,
    answer: str,
    *,
    numbers: Sequence[int],
    operators: str,
    use_all: bool,
    tagged: bool,
    truncated: bool,
) -> float:
    """1.0 if the answer is an expression by the rules, whatever its value, else 0.0.

    The format part; the arguments are those of `correct`. (TinyZero gives its 0.1 for any block.)
    """
    texts = _answers(completion, tagged, truncated)
    found = [_legal(text, answer, numbers, operators, use_all) for text in texts]
    return float(bool(found) and None not in found)


def _apply(operator: str, values: list[Fraction]) -> None:
    b, a = values.pop(), values.pop()
    if operator == "+":
        values.append(a + b)
    elif operator == "-":
        values.append(a - b)
    elif operator == "*":
        values.append(a * b)
    else:
        values.append(a / b)


def _answers(completion: str, tagged: bool, truncated: bool) -> list[str]:
    if tagged:
        return answer_blocks(completion)
    return [] if truncated else [completion]


def _legal(
    text: str, target: str, numbers: Sequence[int], operators: str, use_all: bool
) -> Expression | None:
    """The expression of a text if it keeps to the rules."""
    text, equals, result = text.partition("=")
    if equals and result.strip() != target:
        return None
    found = evaluate(text)
    if found is None or not found.operators <= set(operators):
        return None
    used, given = Counter(found.numbers), Counter(numbers)
    return found if (used == given if use_all else used <= given) else None
