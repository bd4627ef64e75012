r"""Gold answers: cleaned when they are loaded, and looked at before a reward ever sees one.

A gold that no reward can read would make its row unscorable for ever, so the row is dropped at
load, and counted. Two kinds of gold are told apart:

- **numeric**: one number, as `grpo_jax.rewards.numeric.parse` reads it.
- **latex**: a number or any other LaTeX expression, for `reward=latex`. Its form is checked here
  (`well_formed`), and math-verify must make something of it where the extra `verify` is installed.
"""

import importlib.util
import math
import re
from collections.abc import Sequence

from grpo_jax.rewards import numeric

KINDS = ("numeric", "latex")
LONGEST = 300  # characters; the longest gold of the sets known to `evaluation_sets` has 198
# Seconds for one gold, far more than any of theirs takes: what is not read in time is left out, and
# which rows a data set has must not depend on how busy the machine is.
PATIENCE = 30.0

_NUMBER = re.compile(r"([-+−]?)\\?\$?([-+−]?[0-9][0-9,]*(?:\.[0-9]+)?|[-+−]?\.[0-9]+)")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}")
_PAIRS = (("\\(", "\\)"), ("\\[", "\\]"))
_BRACES = re.compile(r"\\.|[{}$]", re.DOTALL)


def clean(gold: object) -> str:
    r"""A gold answer without what is no part of its value; "" for None, NaN and infinities.

    Numbers lose their thousands separators, `$` or `\$` in front, leading zeros and a decimal
    part of zero (142.0 is 142); all golds lose surrounding white space, a full stop at the end,
    the math delimiters around the whole or around each of several answers, and a `\text{}` around
    a number. Words, units and the percent sign stay, for they say what the answer is.

    >>> clean("$1,080."), clean("$69$,$84$"), clean("5.4 \\text{ cents}"), clean(142.0)
    ('1080', '69,84', '5.4 \\text{ cents}', '142')
    """
    if gold is None or (isinstance(gold, float) and not math.isfinite(gold)):
        return ""
    text = str(gold).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _bare(text)
    inside = _TEXT.fullmatch(text)
    plain = re.sub(r",\\!\s*", ",", inside[1].strip() if inside else text).replace("{,}", ",")
    number = _NUMBER.fullmatch(plain)
    value = numeric.parse(plain)
    if number is None or value is None:
        return text
    if value.denominator == 1:
        return str(value.numerator)
    return plain.replace(",", "").replace("\\$", "").replace("$", "").replace("−", "-")


def well_formed(gold: str) -> bool:
    r"""Whether `gold` could be LaTeX: something, not too long, its braces, `$` and `\left` paired.

    Linear in the length; nothing is parsed.
    """
    if not gold or len(gold) > LONGEST:
        return False
    depth = dollars = 0
    for match in _BRACES.finditer(gold):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        dollars += match[0] == "$"
        if depth < 0:
            return False
    left, right = (len(re.findall(rf"\\{side}(?![a-zA-Z])", gold)) for side in ("left", "right"))
    return depth == 0 and dollars % 2 == 0 and left == right


def readable(golds: Sequence[str], kind: str, validate: bool) -> list[bool]:
    """Whether a reward can read each of the clean `golds`, which are of one `kind` of `KINDS`.

    `validate` asks math-verify about golds that are no numbers, each different one once; without
    the extra `verify` (which `reward=latex` needs) their form alone is looked at.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of golds {kind!r}; there are {', '.join(KINDS)}")
    good = {gold: numeric.parse(gold) is not None for gold in golds}
    if kind == "latex":
        open_ones = [gold for gold, right in good.items() if not right and well_formed(gold)]
        good |= dict.fromkeys(open_ones, True)
        if validate and open_ones and importlib.util.find_spec("math_verify") is not None:
            from grpo_jax.rewards import latex

            patient = latex.Latex(seconds=PATIENCE, batch_seconds=20 * PATIENCE, first_seconds=None)
            good |= dict(zip(open_ones, latex.readable(open_ones, patient), strict=True))
    return [good[gold] for gold in golds]


def _bare(text: str) -> str:
    """`text` without the math delimiters around it, or around each of its answers."""
    for left, right in _PAIRS:
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and left not in inside:
            return inside.strip()
    pieces = re.split(r"(?<!\\)\$", text)  # outside, inside, outside, ..., outside
    if len(pieces) < 3 or len(pieces) % 2 == 0:
        return text
    if any(outside.strip(" ,;\n") for outside in pieces[::2]):
        return text  # words, or half of the answer, stand between the formulas
    return "".join(pieces).strip()
