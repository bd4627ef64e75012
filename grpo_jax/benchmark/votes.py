r"""What a completion votes for in maj@k: its final answer, and when two of them are the same.

The final answer is the first of these that there is:

1. the last `<answer>` block, where all tags are in order;
2. the last `\boxed{..}`, if it is closed;
3. the rest of the line behind the first `####`;
4. the last number of the text;
5. the last line that isn't empty.

A completion that was cut off for its length, and an empty one, abstain. Two answers are the same if
both are numbers (`numeric.parse`) and equal, exactly; or, where one is no number, if their texts
are, apart from white space, `$`, `\left`, `\right`, `\!`, `\text{..}`, a full stop at the end, and
`\dfrac`, `\tfrac` for `\frac`. That decides who votes together, never whether an answer is right:
that is the reward's.
"""

import re
from fractions import Fraction

from grpo_jax.rewards import numeric

# digits in one possessive run: linear time on any text
_NUMBER = re.compile(r"[-−]?(?:[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)(?:/[0-9]++)?")
_NOISE = re.compile(r"\s+|\$|\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def vote(completion: str, truncated: bool) -> str | Fraction | None:
    """The final answer as a key: equal keys are one answer. None: it abstains."""
    answer = None if truncated else final_answer(completion)
    if answer is None:
        return None
    number = numeric.parse(answer)
    return _normal(answer) if number is None else number


def final_answer(completion: str) -> str | None:
    """The text of the final answer (see the module), stripped; None if there is none."""
    blocks = numeric.answer_blocks(completion)
    found = blocks[-1] if blocks else numeric.last_boxed(completion)
    if found is None and "####" in completion:
        found = completion.partition("####")[2].strip().partition("\n")[0]
    if found is None:
        numbers = _NUMBER.findall(completion)
        found = numbers[-1].rstrip(",") if numbers else None
    if found is None:
        found = completion.strip().rpartition("\n")[2]
    return found.strip() or None


def _normal(answer: str) -> str:
    text = _NOISE.sub("", _TEXT.sub(r"\1", answer))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
