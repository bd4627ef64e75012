import pytest

from grpo_jax.rewards.chain import correct, worked

DIGITS = (6, 3, 7, 5, 2)  # of the prompt "a6b3c7d5e2:"; running maxima 6 6 7 7 7


def score(completion, truncated=False, answer="7", digits=DIGITS):
    return correct(completion, answer, digits=digits, truncated=truncated)


def test_worked_steps():
    assert worked(DIGITS) == "b36c77d57e27"
    assert worked([4]) == ""


@pytest.mark.parametrize("dots", [0, 1, 9])
def test_right_with_any_number_of_dots(dots):
    assert score("b36c77d57e27" + "." * dots + "=7") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "b36c77d57e27=6",  # wrong answer
        "b36c77d57e27=77",
        "b36c77d57e27=",
        "b36c77d57e27",
        "b36c77d57e27.7",
        "b36c77d57e27=7=7",
        "b36c77d57e27=7.",  # dots belong before the answer
        "b36c77d57e27=7\n",
        "b36c77d57e27?=7",
        "b36c77d57e27.?.=7",
        "b36c77d57=7",  # a step too few
        "b36c77d57e27f27=7",  # a step too many
        "b36.c77d57e27=7",  # dots within the steps
        "b33c77d57e27=7",  # a slip that a later maximum forgives
        "b36c77d57e22=2",  # a slip carried on to the answer
        "b26c77d57e27=7",  # a digit copied wrongly
        "b36d57c77e27=7",  # labels out of order
        "a66b36c77d57e27=7",
        "=7",
        "?=7",  # a lucky guess
        "",
    ],
)
def test_anything_else_is_wrong(completion):
    assert score(completion) == 0.0


def test_a_truncated_text_is_wrong():
    assert score("b36c77d57e27=7", truncated=True) == 0.0


def test_the_gold_answer_counts():
    assert score("b36c77d57e27=7", answer="6") == 0.0


def test_digits_may_be_a_list():
    assert score("b36c77d57e27=7", digits=list(DIGITS)) == 1.0
