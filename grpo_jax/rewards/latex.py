r"""Symbolic answers: math-verify behind a closed door.

math-verify (0.9) compares by way of sympy, which evaluates what a model wrote: `9**9**9**9` never
ends, a deep formula takes all memory. So it runs in worker processes that can be killed
(`workers.py`), and sees little:

1. The answer is what the last `\boxed{..}` holds, or the `<answer>` block (`answer_in`): own code,
   linear time. No answer, one of more than `max_characters`, brackets that don't pair or nest too
   deep, control characters: wrong, and no worker hears of it.
2. Two numbers (`numeric.parse`) are compared exactly, here; so are two words where one of them is
   marked as `\text{}`.
3. Whatever is left goes to a worker as `verify(gold, answer)`, in this order: it isn't symmetric
   (an interval answers an inequality, not the other way round).

A gold that math-verify cannot read, or doesn't find equal to itself, makes the row unscorable. What
a worker could not say in time is a `Failure`: it scores `on_failure` and is counted apart.

math-verify accepts some wrong answers. Refused here before or after it: a percent sign read both
ways (`percent` picks one); a set for a tuple or an interval, and the reverse; numbers in different
bases; digits with only space between ("5 6", which it adds up); an answer that still has a sum,
product, integral, limit, gcd or lcm to do that the gold has not; further numbers inside `\text{}`;
decimals that agree only because both are small (they must agree to five digits); anagrams of words.
Left, since a gold does not say: other units (5 cm for 5 m; they are dropped), capital for small
letters (K for k), AB for BA, unfinished arithmetic (2+3, 5!, \binom{5}{2}), a base that only one
side names, an unordered list for a tuple in the same order.
"""

import importlib.util
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from grpo_jax.rewards.numeric import answer_blocks, last_boxed, parse
from grpo_jax.rewards.workers import Failure, Limits, Workers

EXTRAS = ("math_verify", "pebble")
DEEPEST = 40  # brackets inside brackets; formulas of people have 10
CLOSE = 5e-6  # two numbers of which one is a decimal: |difference| over |gold|, at most
_CHUNK = 500  # golds that are looked at within one bound

Scored = float | None | Failure
_Pair = tuple[str, str | None]  # gold, answer (None: only whether the gold can be read)


@dataclass(frozen=True)
class Latex:
    """The reward: 1.0 if the answer is equal to the gold, else 0.0; None if the gold can't be read.

    Raises ImportError, before anything is loaded, if the extra `verify` is not installed, and
    ValueError for constants out of range.
    """

    answer_in: str = "boxed"  # or "blocks": <answer>..</answer>; or "either": blocks, else boxed
    percent: str = "unit"  # 50% equals 50; or "fraction": 50% equals 0.5. Never both
    max_characters: int = 1000  # of an answer; a longer one is wrong
    on_failure: float | None = 0.0  # score of a row that a worker failed on; None: unscorable
    workers: int | None = None  # processes; None: one a core, 8 at most
    seconds: float = 3.0  # for one row
    batch_seconds: float | None = None  # for all rows of a call: the bound; None: by their number
    memory_mb: int = 1024  # of each worker
    first_seconds: float | None = 0.25  # of computing, that each row gets before any gets more

    def __post_init__(self) -> None:
        for name, value, known in (
            ("answer_in", self.answer_in, ("boxed", "blocks", "either")),
            ("percent", self.percent, ("unit", "fraction")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}: one of {', '.join(known)}")
        if self.max_characters < 1:
            raise ValueError(f"max_characters={self.max_characters}: at least 1")
        _ = self.limits  # which checks itself
        _require_extras()

    @property
    def limits(self) -> Limits:
        return Limits(
            workers=self.workers,
            seconds=self.seconds,
            batch_seconds=self.batch_seconds,
            memory_mb=self.memory_mb,
            first_seconds=self.first_seconds,
        )

    def __call__(self, completion: str, answer: str) -> float | None:
        """One row; `batch` is the way for more."""
        scored = self.batch([completion], [answer])[0]
        return scored.value if isinstance(scored, Failure) else scored

    def batch(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        alternatives: Sequence[Sequence[str] | None] | None = None,
    ) -> list[Scored]:
        """The scores of B completions against B golds, in bounded time (`workers.py`).

        `alternatives` is a column of the data, where it has one: other ways to write a row's gold.
        An answer that is right by one of them is right.
        """
        if alternatives is not None:
            ways = [
                list(dict.fromkeys([gold, *(others or ())]))
                for gold, others in zip(answers, alternatives, strict=True)
            ]
            texts = [text for text, row in zip(completions, ways, strict=True) for _ in row]
            scores = iter(self.batch(texts, [gold for row in ways for gold in row]))
            return [_best([next(scores) for _ in row]) for row in ways]
        rows = [self._row(*pair) for pair in zip(completions, answers, strict=True)]
        # Answers to one prompt are often the same: each different pair is looked at once
        pairs = list(dict.fromkeys(pair for row in rows if isinstance(row, list) for pair in row))
        known = dict(zip(pairs, self._judged(pairs), strict=True))
        return [
            self._sum_up([known[pair] for pair in row]) if isinstance(row, list) else row
            for row in rows
        ]

    def _row(self, completion: str, answer: str) -> list[_Pair] | float | None:
        """The score, where it can be told without a worker, or what to ask one."""
        gold = self._tidy(answer)
        if not _harmless(gold, self.max_characters):
            return None
        number, candidates = _number(gold), self._candidates(completion)
        pairs: list[_Pair] = []
        for candidate in candidates or [None]:
            right = False if candidate is None else self._told(gold, number, candidate)
            if right is False:
                return 0.0 if number is not None else [(gold, None)]
            if right is None:
                pairs.append((gold, candidate))
        return pairs or 1.0

    def _candidates(self, completion: str) -> list[str]:
        """The tidy answers, each different one once; all of them must be right. [] for none."""
        texts: list[str] = []
        if self.answer_in != "boxed":
            texts = answer_blocks(completion)
        if self.answer_in == "boxed" or (
            self.answer_in == "either" and "answer>" not in completion
        ):
            box = last_boxed(completion)
            texts = [] if box is None else [box]
        # a long text is only refused, so its end need not be tidy
        return list(dict.fromkeys(self._tidy(text[: 2 * self.max_characters]) for text in texts))

    def _told(self, gold: str, number: Fraction | None, answer: str) -> bool | None:
        """Whether `answer` is right, where this process can tell; None: ask a worker."""
        if not _harmless(answer, self.max_characters):
            return False
        value = _number(answer)
        if value is not None and number is not None:
            return value == number
        words, gold_words = _word(answer), _word(gold)
        if words and gold_words and (answer != words or gold != gold_words):
            return _same_word(words, gold_words)
        return None if _comparable(gold, answer) else False

    def _tidy(self, text: str) -> str:
        r"""Without delimiters, full stop and what else carries no value; percent signs as `percent`
        has it, `pi` as `\pi`."""
        text = text.replace("−", "-").strip()
        text = re.sub(r"(?<!\\)\$", "", text).strip()
        for left, right in (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")):
            if len(text) > 3 and text.startswith(left) and text.endswith(right):
                text = text[2:-2].strip()
        box = last_boxed(text)
        if box is not None and text in (f"\\boxed{{{box}}}", f"\\fbox{{{box}}}"):
            text = box.strip()
        text = text.removesuffix(".").rstrip()
        text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
        text = _joined_thousands(text)
        hundredth = "" if self.percent == "unit" else r"\\cdot\\frac{1}{100}"
        return re.sub(r" ?\\?%", hundredth, text)

    def _judged(self, pairs: Sequence[_Pair]) -> list[Any]:
        if not pairs:
            return []
        return _pool(self.limits).map(_judge, pairs)

    def _sum_up(self, verdicts: Sequence[Any]) -> Scored:
        """Of a row's answers: wrong if one is, whatever became of the others."""
        if any(verdict is None for verdict in verdicts):
            return None
        if any(verdict is False for verdict in verdicts):
            return 0.0
        for verdict in verdicts:
            if isinstance(verdict, Failure):
                return Failure(verdict.text, self.on_failure, verdict.kind)
        return 1.0


def _best(scores: Sequence[Scored]) -> Scored:
    """Of one answer against several golds: right by any, else what is least known."""
    if 1.0 in scores:
        return 1.0
    failures = [score for score in scores if isinstance(score, Failure)]
    if failures:
        return failures[0]
    return None if all(score is None for score in scores) else 0.0


def readable(golds: Sequence[str], settings: Latex | None = None) -> list[bool]:
    """Whether this reward can score answers to each of these golds: for tasks, when they load.

    A number is readable; so is what math-verify parses and finds equal to itself. One that takes
    too long is not. Every 500 different golds are a call of their own, with its bound.
    """
    settings = settings or Latex()
    tidy = [settings._tidy(gold) for gold in golds]
    good = {g: _number(g) is not None for g in tidy if _harmless(g, settings.max_characters)}
    open_ones = [(gold, None) for gold, number in good.items() if not number]
    for start in range(0, len(open_ones), _CHUNK):
        chunk = open_ones[start : start + _CHUNK]
        for (gold, _), verdict in zip(chunk, settings._judged(chunk), strict=True):
            good[gold] = verdict is False  # read, and there was no answer to be right
    return [good.get(gold, False) for gold in tidy]


def _require_extras() -> None:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the LaTeX reward needs {' and '.join(missing)}, which the extra `verify` brings: "
            "pip install -e '.[verify]'"
        )


@cache
def _pool(limits: Limits) -> Workers:
    return Workers(limits, _prepare)


# ----------------------------------------------------------------------------- here, no sympy


def _number(text: str) -> Fraction | None:
    text, hundredth = text.removesuffix(r"\cdot\frac{1}{100}"), r"\cdot\frac{1}{100}" in text
    value = parse(text)
    return value / 100 if value is not None and hundredth else value


def _harmless(text: str, longest: int) -> bool:
    """Something, not too long, its brackets paired and not too deep, nothing invisible in it."""
    if not text or len(text) > longest:
        return False
    braces = depth = deepest = 0
    escaped = False
    for character in text:
        if character not in "\n\t\r" and unicodedata.category(character)[0] == "C":
            return False
        if escaped:
            escaped = False
            continue
        escaped = character == "\\"
        braces += (character == "{") - (character == "}")
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth, -depth)
        if braces < 0:
            return False
    return braces == depth == 0 and not escaped and deepest <= DEEPEST


_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox) ?\{([^{}]*)\}")
_SPACE = r"(?:\\[ ,;:!]|[ ~])"
_SPACED = re.compile(rf"[0-9.]+(?:{_SPACE}+[0-9.]+)+")
_THOUSANDS = re.compile(rf"[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?:\.[0-9]+)?")
_BASE = re.compile(r"[0-9A-F]_(?:\{ ?([0-9]+) ?\}|([0-9]))")
_OPERATIONS = re.compile(
    r"\\(?:sum|prod|i*nt|oint|lim|gcd|lcm|operatorname ?\{ ?(?:gcd|lcm))(?![a-z])"
)


def _joined_thousands(text: str) -> str:
    r"""`1\,234` and `1 234` as one number; other digits with a gap stay as they are."""
    return re.sub(_SPACE, "", text) if _THOUSANDS.fullmatch(text) else text


def _word(text: str) -> str:
    r"""The words of a text of letters only, with or without `\text{}` around; "" for all else."""
    inside = _TEXT.fullmatch(text)
    words = inside[1] if inside else text
    return words if re.fullmatch(r"[A-Za-z][A-Za-z -]+", words.strip()) else ""


def _same_word(left: str, right: str) -> bool:
    return left.casefold().split() == right.casefold().split()


def _comparable(gold: str, answer: str) -> bool:
    """False where the two can't be equal, although math-verify might find them so."""
    if _SPACED.fullmatch(answer) or "\\boxed" in answer:
        return False
    if {_brackets(gold), _brackets(answer)} in ({"{}", "()"}, {"{}", "[]"}):
        return False
    bases, others = _bases(gold), _bases(answer)
    if bases and others and bases != others:
        return False
    if set(_OPERATIONS.findall(answer)) - set(_OPERATIONS.findall(gold)):
        return False
    known = set(_TEXT.findall(gold))
    return not any(
        re.search("[0-9]", words) and words not in known and parse(words) is None
        for words in _TEXT.findall(answer)
    )


def _bases(text: str) -> set[str]:
    return {braced or plain for braced, plain in _BASE.findall(text)}


def _brackets(text: str) -> str:
    r"""The kind of bracket that is around a text of several elements: "{}", "()", "[]" or ""."""
    text = re.sub(r"\\(?:left|right|[bB]ig+[lr]?)(?![a-z])", "", text).strip()
    if "," not in text:
        return ""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}"
    if text[0] in "([" and text[-1] in ")]":
        return "[]" if "[" in text[0] or "]" in text[-1] else "()"
    return ""


# ------------------------------------------------------------------------------ in a worker


def _prepare() -> None:
    """The slow imports, and one formula of each kind: the first takes several times the time."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing alarms
    for pair in (
        (r"\frac{\sqrt{1}}{2}", r"\frac{1}{2}"),
        ("x^2+1", "1+x^2"),
        ("x>5", r"(5,\infty)"),
        (r"\frac12", r"\int_0^1 x dx"),
    ):
        _judge(pair)


def _judge(pair: _Pair) -> bool | None:
    """Whether the answer equals the gold (False for no answer); None if the gold can't be read."""
    gold, answer = _parsed_gold(pair[0]), pair[1]
    if gold is None:
        return None
    if answer is None:
        return False
    value = _parsed(answer)
    return bool(value) and _verified(gold, value) and _close(gold[0], value[0])


@lru_cache(maxsize=512)
def _parsed_gold(text: str) -> list[Any] | None:
    value = _parsed(text)
    return value if value and _verified(value, value) else None


def _parsed(text: str) -> list[Any]:
    """Of the whole text or nothing: no search for some other formula inside it."""
    from math_verify import LatexExtractionConfig, parse

    return parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=0,  # none of this library's alarms: the worker has its own
    )


def _verified(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=0))


def _close(gold: Any, answer: Any) -> bool:
    """Decimals are compared to six places, which every small number is equal to 0 in."""
    both = (gold, answer)  # of sympy, whose names a layer test keeps out of this file
    if not all(getattr(x, "is_number", False) for x in both):
        return True
    if not any(getattr(atom, "is_Float", False) for x in both for atom in x.atoms()):
        return True
    right, value = (x.doit().evalf(15) for x in both)
    return bool(abs(right - value) <= CLOSE * abs(right))
