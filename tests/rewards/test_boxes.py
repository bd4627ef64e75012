r"""What stands in `\boxed{}`, the numeric reward for it, and what the numeric rewards cost."""

import time

import pytest

from grpo_jax.rewards import numeric
from grpo_jax.rewards.numeric import LONGEST_BOX, last_boxed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\fbox{5}", "5"),
        ("\\boxed {5}", "5"),
        ("\\boxed{}", ""),
        ("\\boxed{5", None),
        ("\\boxed{5} or \\boxed{6", None),
        ("\\boxed 5", None),
        ("5", None),
        ("", None),
        ("\\boxed{" + "5" * LONGEST_BOX + "}", None),
    ],
)
def test_the_last_box(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("so \\boxed{8}.", 1.0),
        ("\\boxed{7}, no: \\fbox{ 8.0 }", 1.0),  # policy: the last box
        ("\\boxed{8} \\boxed{7}", 0.0),
        ("\\boxed{8} \\boxed{8", 0.0),  # cut off
        ("\\boxed{\\text{8}}", 1.0),
        ("\\boxed{\\frac{16}{2}}", 1.0),
        ("\\boxed{x = 8}", 0.0),
        ("\\boxed{}", 0.0),
        ("\\boxed 8", 0.0),
        ("8", 0.0),
        ("", 0.0),
    ],
)
def test_boxed(completion, reward):
    assert numeric.boxed(completion, "8") == reward


def test_ordinary_rows_cost_less_than_a_tenth_of_a_millisecond():
    text = "He earns 3 * 360 = $1,080 a month. " * 8
    texts = [text + "<answer>\n1,080\n</answer>", text + "\\boxed{\\$1{,}080}.", text + "#### 1080"]
    for reward, row in ((numeric.correct, 0), (numeric.boxed, 1), (numeric.last_number, 2)):

        def seconds(reward=reward, row=row):
            start = time.process_time()
            for _ in range(200):
                assert reward(texts[row], "1080") == 1.0
            return (time.process_time() - start) / 200

        assert min(seconds() for _ in range(5)) < 1e-4
