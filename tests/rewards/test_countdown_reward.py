"""rewards/countdown.py: what is an expression, what keeps to the rules, and what is refused."""

import time
from fractions import Fraction

import pytest

from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.rewards.countdown import MAX_CHARACTERS, correct, evaluate, legal

RULES = {"numbers": (3, 3, 8, 8), "operators": "+-*/", "use_all": True}
RAW = RULES | {"tagged": False, "truncated": False}


def raw(text, answer="24", **changes):
    """(correct, legal) of a text that is all answer."""
    columns = RAW | changes
    return correct(text, answer, **columns), legal(text, answer, **columns)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("007", 7),
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("10-4-3", 3),  # from the left
        ("24/4/2", 3),
        ("2-3*4+5", -5),
        ("1/3+1/6", Fraction(1, 2)),
        ("8/(3-8/3)", 24),  # no float makes it
        (" ( 1 +\n2 ) * ((3)) ", 9),
        ("-3+8", 5),
        ("-2*3", -6),
        ("2*(-3)", -6),
        ("-(-(2))", 2),
        ("(-3+8)*2", 10),
        ("6−2×3÷2", 3),
    ],
)
def test_the_value_of_an_expression(text, value):
    assert evaluate(text).value == value


def test_what_an_expression_is_made_of():
    found = evaluate("-(12+7)*7")
    assert (found.numbers, found.operators) == ((12, 7, 7), {"-", "+", "*"})
    assert evaluate("12").operators == set()


NOT_EXPRESSIONS = [
    *("", " ", "()", "(", ")", "1)", "(1", "1)+(2", ")1(", "1+(2", "((1+2)", "(1)(2)"),
    *("+", "1+", "*2", "+2", "1++2", "1--2", "1+-2", "3*-2", "--3", "1 2", "1(2)", "(1)2"),
    *("2**3", "7//2", "7%2", "2^3", "1.5", ".5", "1e9", "1E2", "1_0", "0x10", "1,000", "5!"),
    *("a", "1+a", "__import__('os').system('x')", "().__class__", "lambda:0", "1;2", "1\x00"),
    *("٣+٤", "１+２", "²", "1²", "½", "①", "Ⅷ"),  # digits to Python, or numbers, not ours
    *("3/0", "3/(2-2)", "0/0", "1/(1-1/1)"),
    "1234567890",  # ten digits
    "(" * 10_000 + "1" + ")" * 10_000,
    "1+" * 128 + "1",  # 257 characters
    *("= 24", "1=1=1"),
]


@pytest.mark.parametrize("text", NOT_EXPRESSIONS, ids=lambda text: text[:20])
def test_what_is_no_expression(text):
    assert evaluate(text) is None
    assert raw(text, "1", numbers=(1, 2, 3), use_all=False) == (0.0, 0.0)


def test_the_longest_text_is_read():
    assert evaluate("(" * 127 + "10" + ")" * 127).value == 10
    assert evaluate("1+" * 127 + "1 ").value == 128
    assert len("(" * 127 + "10" + ")" * 127) == MAX_CHARACTERS


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("8/(3-8/3)", (1, 1)),
        (" 8 / (3 - 8 / 3)\n", (1, 1)),
        ("8 / (3 - 8 / 3) = 24", (1, 1)),
        ("8 / (3 - 8 / 3) = 25", (0, 0)),  # it says itself that it is another
        ("8 / (3 - 8 / 3) = 8 * 3", (0, 0)),
        ("8 / (3 - 8 / 3) = 24 = 24", (0, 0)),
        ("8+8+3+3", (0, 1)),  # by the rules, another value
        ("8+8+3+3 = 24", (0, 1)),
        ("8*3", (0, 0)),  # two numbers are left over
        ("8*3*(8-8+3)/3", (0, 0)),  # one 8 too many
        ("24", (0, 0)),
        ("24+3-3+8-8", (0, 0)),
        ("8/(3-8/3) is it", (0, 0)),
        ("<answer>8/(3-8/3)</answer>", (0, 0)),  # no tags were asked for
        ("8/(3-8/3)\n3, 5 = 2", (0, 0)),
    ],
)
def test_every_number_exactly_once(text, scores):
    assert raw(text) == scores


@pytest.mark.parametrize(
    ("text", "scores"),
    [("8*3", (1, 1)), ("8/(3-8/3)", (1, 1)), ("3", (0, 1)), ("3*3", (0, 1)), ("3+3+3", (0, 0))],
)
def test_every_number_at_most_once(text, scores):
    assert raw(text, use_all=False) == scores


def test_only_the_operators_that_are_allowed():
    assert raw("8*3", use_all=False, operators="+*") == (1, 1)
    assert raw("8/3", use_all=False, operators="+*") == (0, 0)
    assert raw("-3+8", "5", use_all=False, operators="+*") == (0, 0)


def test_a_raw_answer_that_was_cut_off_counts_for_nothing():
    assert raw("8/(3-8/3)", truncated=True) == (0, 0)  # what came next may have changed it


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("<reasoning>\n8+8=16\n</reasoning>\n<answer>\n8/(3-8/3)\n</answer>\n", (1, 1)),
        ("<answer>8/(3-8/3)</answer>", (1, 1)),
        ("<answer>8/(3-8/3)</answer><answer>8/(3-8/3)=24</answer>", (1, 1)),
        ("<answer>8/(3-8/3)</answer><answer>8+8+3+3</answer>", (0, 1)),
        ("<answer>8+8+3+3</answer><answer>8/(3-8/3)</answer>", (0, 1)),
        ("<answer>8/(3-8/3)</answer><answer>?</answer>", (0, 0)),
        ("<answer>8/(3-8/3)", (0, 0)),
        ("8/(3-8/3)", (0, 0)),
        ("<answer></answer>", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_answers_in_blocks(text, scores):
    for truncated in (False, True):  # a closed block is whole
        columns = RULES | {"tagged": True, "truncated": truncated}
        assert (correct(text, "24", **columns), legal(text, "24", **columns)) == scores


@pytest.mark.parametrize("answer", ["", "x", "-3", "2.5", "٣"])
def test_a_target_that_is_no_number_makes_the_row_unscorable(answer):
    assert correct("3", answer, **RAW) is None


def test_hostile_rows_are_scored_at_once():
    hostile = [
        *NOT_EXPRESSIONS,
        "9" * 100_000,
        "(" * 100_000,
        "9*" * 100_000,
        "<answer>" * 20_000,
        "<answer>" + "-(" * 50_000 + "</answer>",
        "9**9**9**9",
        "[" * 50_000 + "]" * 50_000,
        "8" + " " * 100_000 + "8",
        "=" * 100_000,
        "999999999*" * 25 + "9",
    ]
    rows = (hostile * 2)[:128]
    assert len(rows) >= 64
    parts = [RewardPart("correct", correct), RewardPart("legal", legal, 0.1)]
    columns = RAW | {"numbers": (9, 9)}
    for tagged in (True, False):
        many = {name: [value] * len(rows) for name, value in (columns | {"tagged": tagged}).items()}
        began = time.perf_counter()
        table = score(parts, rows, ["81"] * len(rows), many)
        took = time.perf_counter() - began
        print(f"{len(rows)} hostile rows, tagged={tagged}: {took:.3f} s")
        assert took < 2
        assert not table.total.any() and table.failed == {"correct": 0, "legal": 0}
