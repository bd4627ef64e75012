r"""The five rewards of the article, kept exactly, flaws included, so that its run can be repeated.

Source: the project's article, sections 2.1 and 2.7. Section 2.1 prints `extract_xml_answer`, the
correctness reward and `count_xml`; here they give the same value for every text. Section 2.7
*names* three more (soft format, strict format, int) and prints no body: those here are the usual
ones of the Unsloth GRPO notebooks that the article adapts, with one change, DOTALL, without which
reasoning of more than one line can never match.

What these reward by accident, and `numeric.py` does not:

- without tags the whole text counts as the answer, and a block that is never closed counts too;
- of several blocks the last one counts;
- a blank answer equals a blank gold;
- `xmlcount` charges a completion that ends at `</answer>` (the normal case: the end-of-sequence
  token comes next) for every character of its text, charges trailing text twice, and has no floor;
- `integer` refuses -8, 8.0 and 1,234.

Every function takes `(completion, answer)` and returns a float, never None.
"""

import re

# The groups are atomic: the first place where a block ends and the next begins is also the best
# one, so what matches is the same as without them, and a hostile text costs linear time.
_STRICT = re.compile(
    r"^<reasoning>\n(?>.*?\n</reasoning>\n<answer>\n).*?\n</answer>\n$", flags=re.DOTALL
)
_SOFT = re.compile(r"<reasoning>(?>.*?</reasoning>\s*<answer>).*?</answer>", flags=re.DOTALL)


def extract_xml_answer(text: str) -> str:
    """What follows the last `<answer>`, up to the next `</answer>`, stripped (article 2.1).

    The whole text where there is no tag, and the whole rest where the block is not closed.
    """
    _, _, tail = text.rpartition("<answer>")
    return tail.partition("</answer>")[0].strip()


def count_xml(text: str) -> float:
    """Partial credit for tags (article 2.1): 1/8 for each of four tags on a line of its own.

    0.001 is taken off for each character behind the answer, by two rules that both apply when a
    newline follows `</answer>`. At most 0.5; no lower bound.
    """
    score = 0.125 * (text.count("<reasoning>\n") == 1)
    score += 0.125 * (text.count("\n</reasoning>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        # No newline behind </answer>: nothing is split off, and the whole text is charged.
        score += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        score += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
    return score


def xmlcount(completion: str, answer: str) -> float:
    """`count_xml` of the completion; the gold answer plays no part."""
    return count_xml(completion)


def soft_format(completion: str, answer: str) -> float:
    """0.5 for a reasoning block at the very start and an answer block behind it, else 0.

    Named but not printed by the article; see the module's docstring.
    """
    return 0.5 if _SOFT.match(completion) else 0.0


def strict_format(completion: str, answer: str) -> float:
    r"""0.5 for the two blocks with every tag on its own line and a final newline, else 0.

    Named but not printed by the article; see the module's docstring.
    """
    return 0.5 if _STRICT.match(completion) else 0.0


def integer(completion: str, answer: str) -> float:
    """0.5 if the extracted answer consists of digits only (`str.isdigit`), else 0.

    The article's "int" reward, named but not printed; see the module's docstring.
    """
    return 0.5 if extract_xml_answer(completion).isdigit() else 0.0


def correctness(completion: str, answer: str) -> float:
    """2.0 if the extracted answer is the gold, character for character, else 0.0 (article 2.1)."""
    return 2.0 if extract_xml_answer(completion) == answer else 0.0
