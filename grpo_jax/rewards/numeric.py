r"""The default rewards: an exact comparison of numbers, and format rewards without known holes.

What a model writes is hostile input. `parse` reads a small closed grammar into an exact rational:
nothing is evaluated, no float is made, and texts longer than 64 characters or exponents beyond
+-30 are refused *before* any conversion (`Fraction("1e9999999")` was measured to run for over 6
seconds). Every pattern runs in linear time.

The grammar, around which white space is free:

    value     wrapper(value) | number | number / number | \frac
    wrapper   $..$  \(..\)  \[..\]  **..**  \boxed{..}  \text{..}  \textbf{..}  \mathrm{..}
              \mathbf{..}, with or without a full stop behind
    number    digits in one run or in well-formed thousands (1,234 or 1{,}234 or 1,\!234; never
              1,23,4 or 0,123), with an optional decimal part (.5 is one) and exponent (1e3)
    \frac     also \dfrac and \tfrac; \frac12, \frac{1}{2}
    around    one sign, + or - or U+2212, space behind it allowed; `$` or `\$` in front; `%` or
              `\%` behind; a full stop at the end

Policies, chosen once, where trusted tools differ:

- **percent**: the sign is a unit and is dropped. 50% equals 50, never 1/2 (the golds of GSM8K are
  written so).
- **units**: the sign `$` is dropped; words are not. "18 dollars" is not a number: no comparison
  of numbers can tell it from "18 cents". `last_number` is the lenient reward.
- **several answers**: every answer block must be right. Blocks that disagree, or one that is opened
  and never closed, make the completion wrong. Of several boxes the last one counts (as in MATH).
- **digits** are ASCII. Full-width and other scripts' digits are not numbers here.
- **mixed numbers** ("1 1/2"), letters (pi/2), intervals and sums are outside the grammar.
- **gold**: one that cannot be parsed makes the row unscorable (None), never right or wrong.
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 64
MAX_EXPONENT = 30
LONGEST_BOX = 10_000  # characters; what is longer is no answer to any of these rewards
TRAILING_CHARGE = 0.001  # for each character behind the answer block, as in the article

_NUMBER = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_BRACED = rf"\{{ ?[+-]? ?{_NUMBER} ?\}}"
_VALUE = re.compile(
    r"(?P<sign>[+-]?) ?(?:\\?\$)? ?(?P<inner_sign>[+-]?) ?"
    rf"(?:(?P<top>{_NUMBER})(?: ?/ ?(?P<bottom>{_NUMBER}))?"
    rf"|\\[dt]?frac ?(?P<over>[0-9]|{_BRACED}) ?(?P<under>[0-9]|{_BRACED}))"
    r" ?(?:\\?%)? ?\.?"
)
_WRAPPERS = (
    ("$", "$"),
    ("**", "**"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("\\boxed{", "}"),
    ("\\text{", "}"),
    ("\\textbf{", "}"),
    ("\\mathrm{", "}"),
    ("\\mathbf{", "}"),
)
# A number in running text: looser than _NUMBER, so that 1,23,4 is found as one (malformed) number.
# A minus belongs to the number only where nothing stands before it that it could subtract from.
_LOOSE = r"(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_IN_TEXT = re.compile(
    r"(?:(?<![\w)}])[-−])?(?:\\?\$)?"
    rf"(?:{_LOOSE}(?:/{_LOOSE})?|\\[dt]?frac(?:[0-9]|\{{-?{_LOOSE}\}})(?:[0-9]|\{{-?{_LOOSE}\}}))"
)
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_TAG = re.compile(r"(</?answer>)")
_TAG = re.compile(r"</?(?:reasoning|answer)>")
_TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]


def parse(text: str) -> Fraction | None:
    """The one number that `text` as a whole is, exactly; None if it is not one.

    See the module's docstring for the grammar. Never raises for a string; costs microseconds.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    text = _plain_thousands(" ".join(text.split()).replace("−", "-"))
    match = _VALUE.fullmatch(_unwrap(text))
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    top = _exact(match["top"] or match["over"])
    bottom = _exact(match["bottom"] or match["under"] or "1")
    if top is None or not bottom:  # a zero divisor is no number either
        return None
    negative = "-" in (match["sign"], match["inner_sign"])
    return -top / bottom if negative else top / bottom


def matches(answer: str, gold: str) -> bool:
    """Whether both texts are numbers and the same one. Symmetric; False where one is no number."""
    value = parse(answer)
    return value is not None and value == parse(gold)


def correct(completion: str, answer: str) -> float | None:
    """The default reward: 1.0 if the number in the answer block equals the gold, else 0.0.

    The answer must stand in a closed `<answer>...</answer>` block, and all blocks must be right if
    there are several. None (unscorable) if the gold is no number.
    """
    gold = parse(answer)
    if gold is None:
        return None
    blocks = answer_blocks(completion)
    return 1.0 if blocks and all(parse(block) == gold for block in blocks) else 0.0


def plain(completion: str, answer: str) -> float | None:
    """For raw few-shot tasks: 1.0 if the completion is the gold number and nothing else, else 0.0.

    None (unscorable) if the gold is no number.
    """
    gold = parse(answer)
    if gold is None:
        return None
    return 1.0 if parse(completion) == gold else 0.0


def boxed(completion: str, answer: str) -> float | None:
    r"""For prompts that ask for a box: 1.0 if the last `\boxed{..}` holds the gold, else 0.0.

    As in MATH's own grader the last box counts, and one that is never closed is no answer. None
    (unscorable) if the gold is no number; `latex.Latex` is the reward for golds of other kinds.
    """
    gold = parse(answer)
    if gold is None:
        return None
    box = last_boxed(completion)
    return 1.0 if box is not None and parse(box) == gold else 0.0


def last_number(completion: str, answer: str) -> float | None:
    """For running text: 1.0 if its final number equals the gold, else 0.0.

    The final number is the last of the line behind the first `####` (the marker of GSM8K, Cobbe et
    al. 2021, arXiv:2110.14168; what a base model writes behind that line answers another question),
    or the last of the whole text where there is no marker. A malformed last number is wrong; it
    doesn't send the search back to an earlier one. None (unscorable) if the gold is no number.
    """
    gold = parse(answer)
    if gold is None:
        return None
    _, marker, tail = completion.partition("####")
    text = tail.strip().partition("\n")[0] if marker else completion
    last = ""
    for match in _IN_TEXT.finditer(_plain_thousands(text)):
        last = match[0]
    return 1.0 if parse(last) == gold else 0.0


def is_number(completion: str, answer: str) -> float:
    """1.0 if every answer block (at least one, all closed) holds a number, else 0.0.

    The article's "int" reward, mended: -8, 8.0 and 1,234 are numbers.
    """
    blocks = answer_blocks(completion)
    return 1.0 if blocks and all(parse(block) is not None for block in blocks) else 0.0


def tag_format(completion: str, answer: str) -> float:
    """1.0 if reasoning and answer tags stand once each, closed and in order, else 0.0.

    Lines don't matter, nor does text around the blocks; `tag_count` charges for that.
    """
    return 1.0 if _TAG.findall(completion) == _TAGS else 0.0


def tag_count(completion: str, answer: str) -> float:
    """Partial credit for tags, between 0 and 0.5: the article's `count_xml`, mended.

    1/8 for each of the four tags that stands exactly once, on a line of its own or not, less 0.001
    for each character behind `</answer>`; surrounding white space there is free, and the end of the
    text needs no newline.
    """
    score = 0.125 * sum(completion.count(tag) == 1 for tag in _TAGS)
    if completion.count("</answer>") == 1:
        trailing = completion.partition("</answer>")[2].strip().replace("\r\n", "\n")
        score -= TRAILING_CHARGE * len(trailing)
    return max(score, 0.0)


def answer_blocks(completion: str) -> list[str]:
    """The texts of all `<answer>` blocks, in order; [] if any tag is unclosed, nested or stray."""
    pieces = _ANSWER_TAG.split(completion)  # text, tag, text, tag, ..., text
    tags = pieces[1::2]
    if tags != ["<answer>", "</answer>"] * (len(tags) // 2):
        return []
    return pieces[2::4]


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{..}` (or `\fbox{..}`) of a text holds.

    None if there is none, or the last one isn't closed, or not within `LONGEST_BOX` characters.
    Braces behind a backslash don't count. Linear in the length.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    box = _BOX.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0))
    if box is None:
        return None
    start, depth = box.end(), 1
    for match in _BRACE.finditer(text, start, start + LONGEST_BOX):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def _plain_thousands(text: str) -> str:
    r"""LaTeX's two spellings of a thousands separator, `{,}` and `,\!`, as a comma."""
    return text.replace("{,}", ",").replace(",\\!", ",")


def _unwrap(text: str) -> str:
    """`text` without the wrappers of the grammar; each pass removes at least two characters."""
    while True:
        body = text.removesuffix(".").rstrip()
        for left, right in _WRAPPERS:
            if (
                len(body) > len(left) + len(right)
                and body.startswith(left)
                and body.endswith(right)
            ):
                text = body[len(left) : -len(right)].strip()
                break
        else:
            return text


def _exact(number: str) -> Fraction | None:
    """The value of a text that has passed the grammar; None if its exponent is over the cap."""
    number = number.strip("{}").replace(" ", "").replace(",", "").lower()
    exponent = number.partition("e")[2]
    if exponent and abs(int(exponent)) > MAX_EXPONENT:  # at most 64 digits: instant
        return None
    return Fraction(number)
