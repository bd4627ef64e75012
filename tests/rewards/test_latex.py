r"""latex.py: what is equal, what isn't, and what can't be said."""

import importlib.util
import math
import threading
import time
from pathlib import Path

import pytest

from grpo_jax.check import ConfigError
from grpo_jax.config import compose, make_run
from grpo_jax.rewards import latex
from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.rewards.latex import Latex, readable
from grpo_jax.rewards.workers import Failure
from tests.rewards.judges import HASTY, JUDGE, judged

EQUAL = (
    ("x^2+1", "1+x^2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("\\frac{3}{\\sqrt2}", "\\frac{3\\sqrt2}{2}"),
    ("3\\sqrt{2}", "\\sqrt{18}."),
    ("\\{1,2\\}", "\\left\\{2,1\\right\\}"),
    ("1,2", "2,1"),
    ("(1,2)", "1,2"),
    ("[1,2)", "\\left[1,2\\right)"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("x>5", "(5,\\infty)"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\text{Evelyn}", "Evelyn"),
    ("\\text{no solution}", "\\text{No  solution}"),
    ("5", "5\\text{ cm}"),
    ("1234", "1\\,234"),
    ("\\sqrt2", "1.414214"),
    ("\\frac{\\pi}{2}", "pi/2"),
    ("$\\frac12$", "\\(\\frac{1}{2}\\)"),
    ("\\boxed{5}", "\\sqrt{25}"),
    ("2^{2003}", "2^{2003}"),
    ("\\sum_{n=1}^{\\infty} n^{-2}", "\\sum_{n=1}^{\\infty} n^{-2}"),
    ("2516_8", "2516_{8}"),
)
UNEQUAL = (
    ("x^2+1", "x^2-1"),
    ("x", "y"),
    ("x=5", "y=5"),
    ("5", "\\pm 5"),
    ("5", "5,6"),
    ("5", "5\\text{ or }6"),
    ("[1,2)", "(1,2)"),
    ("1\\frac12", "\\frac{1}{2}"),
    ("\\infty", "-\\infty"),
    ("\\sqrt2", "1.41"),
    ("\\frac13", "0.333333"),  # two numbers: exactly
    ("5", "9<10"),
    # what math-verify finds equal
    ("(1,2)", "\\{1,2\\}"),
    ("\\{1,2\\}", "(1,2)"),
    ("(1,2,3)", "\\{3,2,1\\}"),
    ("10_2", "10_3"),
    ("10_2", "10_{3}"),
    ("11", "5 6"),
    ("3", "1\\,2"),
    ("5050", "\\sum_{n=1}^{100} n"),
    ("\\frac12", "\\int_0^1 x dx"),
    ("6", "\\gcd(12,18)"),
    ("6", "\\operatorname{lcm}(2,3)"),
    ("5", "5\\text{ or 6}"),
    ("10^{-7}", "0.0"),
    ("\\text{east}", "seat"),
    ("east", "\\text{seat}"),
)
NO_ANSWER = ("", " ", "(", "{5", "\\", "a\x00b", "5\u202e", "\ud800", "(" * 41 + "1" + ")" * 41)
UNREADABLE = ("", " ", "\\frac{1}{0}", "0.\\overline{3}", "{5", "5" * 1001, "\x00", "((((")


@pytest.fixture(scope="module")
def table():
    return judged(EQUAL + UNEQUAL)


@pytest.mark.parametrize("pair", EQUAL, ids=str)
def test_equal(table, pair):
    assert table[pair] == 1.0


@pytest.mark.parametrize("pair", UNEQUAL, ids=str)
def test_unequal(table, pair):
    assert table[pair] == 0.0


def test_only_what_is_no_number_goes_to_a_worker(monkeypatch):
    asked = []

    def judged_right(_, pairs):
        asked.extend(pairs)
        return [True] * len(pairs)

    monkeypatch.setattr(Latex, "_judged", judged_right)
    boxes = [f"\\boxed{{{x}}}" for x in ("5", "6", *NO_ANSWER, "x", "x", "x", "\\text{no}")]
    golds = ["5"] * (len(boxes) - 4) + ["y"] * 3 + ["\\text{yes}"]
    scores = JUDGE.batch(boxes, golds)
    assert scores[:2] == [1.0, 0.0] and scores[2 : 2 + len(NO_ANSWER)] == [0.0] * len(NO_ANSWER)
    # three rows that ask the same are one question
    assert asked == [("y", "x"), ("\\text{yes}", None)]


def test_where_the_answer_is_looked_for():
    texts = {
        "box": "\\boxed{x+1}",
        "block": "<answer>x+1</answer>",
        "both": "<answer>\\boxed{x+1}</answer>",
        "apart": "\\boxed{y} <answer>x+1</answer>",
        "disagree": "<answer>x+1</answer><answer>y</answer>",
        "agree": "<answer>x+1</answer><answer>1+x</answer>",
        "open": "\\boxed{x+1} <answer>x+1",
        "prose": "<answer>It is $x+1$</answer>",
    }
    want = {
        "boxed": {"box", "both", "open"},
        "blocks": {"block", "both", "apart", "agree"},
        "either": {"box", "block", "both", "apart", "agree"},
    }
    for place, right in want.items():
        judge = Latex(**{**vars(JUDGE), "answer_in": place})
        scores = judge.batch(list(texts.values()), ["x+1"] * len(texts))
        assert {n for n, s in zip(texts, scores, strict=True) if s == 1.0} == right, place
        assert set(scores) == {0.0, 1.0}


def test_a_gold_that_cannot_be_read_is_unscorable_whatever_the_answer():
    for box in ("5", "\\frac{1}{0}", "x", ""):
        scores = JUDGE.batch([f"\\boxed{{{box}}}"] * len(UNREADABLE), list(UNREADABLE))
        assert scores == [None] * len(UNREADABLE)
    assert readable(UNREADABLE, JUDGE) == [False] * len(UNREADABLE)
    golds = [gold for gold, _ in EQUAL]
    assert readable(golds, JUDGE) == [True] * len(golds)
    assert JUDGE("no box at all", "x^2") == 0.0


def test_a_failure_scores_a_value_and_is_counted():
    boxes = ["\\boxed{(10^9)!}", "\\boxed{x}", "\\boxed{x+1}"]
    for value in (0.0, None):
        judge = Latex(**{**vars(HASTY), "on_failure": value})
        table = score([RewardPart("latex", judge)], boxes, ["x+1"] * 3)
        assert table.failed == {"latex": 1} and table.unscorable == {"latex": 0}
        first = table.parts["latex"][0]
        assert math.isnan(first) if value is None else first == 0.0
        assert table.parts["latex"][1:].tolist() == [0.0, 1.0]
        assert "over 1 s (row 0: completion '" in table.errors["latex"]


def test_a_wrong_answer_beside_a_hanging_one_is_wrong():
    judge = Latex(**{**vars(HASTY), "answer_in": "blocks"})
    text = "<answer>(10^9)!</answer><answer>{}</answer>"
    (wrong, unknown) = judge.batch([text.format("y"), text.format("x+1")], ["x+1"] * 2)
    assert wrong == 0.0 and isinstance(unknown, Failure) and unknown.kind == "timeout"


def test_percent_is_read_one_way():
    pairs = (("50", "50\\%"), ("0.5", "50\\%"), ("\\sqrt{2500}", "50%"), ("\\sqrt{0.25}", "50\\%"))
    assert [judged(pairs)[p] for p in pairs] == [1.0, 0.0, 1.0, 0.0]
    assert [judged(pairs, percent="fraction")[p] for p in pairs] == [0.0, 1.0, 0.0, 1.0]


def test_the_same_in_a_thread_and_other_batches_don_t_matter():
    found = []
    thread = threading.Thread(target=lambda: found.append(JUDGE("\\boxed{1+x}", "x+1")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_without_the_extra_nothing_loads(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in latex.EXTRAS else find(name)
    )
    with pytest.raises(ConfigError, match=r"math_verify and pebble.*pip install -e '\.\[verify\]'"):
        make_run(compose("reward=latex"), Path("runs"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"answer_in": "box"}, "answer_in='box': one of boxed, blocks, either"),
        ({"percent": "both"}, "percent='both': one of unit, fraction"),
        ({"max_characters": 0}, "max_characters=0"),
        ({"workers": 0}, "workers=0"),
        ({"seconds": 90.0, "batch_seconds": 60.0}, "seconds=90"),
        ({"seconds": 0.0}, "seconds=0"),
        ({"memory_mb": 1}, "memory_mb=1"),
    ],
)
def test_its_constants_are_checked(wrong, text):
    with pytest.raises(ValueError, match=text):
        Latex(**wrong)


def test_the_configuration_names_the_key():
    with pytest.raises(ConfigError, match=r"reward\.correct\.function: percent='both': one of"):
        make_run(compose("reward=latex", "reward.correct.function.percent=both"), Path("runs"))


def test_its_configuration_has_the_defaults_of_the_code():
    (part,) = make_run(compose("reward=latex"), Path("runs")).reward
    assert part.function == Latex()


def test_ordinary_rows_are_cheap():
    boxes = ["\\boxed{\\frac{1,234}{5}}", "so \\boxed{ 72 }", "no box"] * 200
    golds = ["72"] * len(boxes)
    start = time.process_time()
    JUDGE.batch(boxes, golds)
    assert (time.process_time() - start) / len(boxes) < 1e-3  # 0.05 ms on an idle machine


def test_any_of_the_alternative_golds_will_do():
    texts = ["\\boxed{0.5}", "\\boxed{3}", "\\boxed{7}"]
    golds, others = ["\\frac13", "1", "{"], [["\\frac13", "1/2"], None, ()]
    assert Latex().batch(texts, golds) == [0.0, 0.0, None]
    assert Latex().batch(texts, golds, others) == [1.0, 0.0, None]
    # as a column of the data
    table = score([RewardPart("correct", Latex())], texts, golds, {"alternatives": others})
    assert table.total[:2].tolist() == [1.0, 0.0] and math.isnan(table.total[2])


def test_what_is_least_known_of_several_golds_counts():
    hung = Failure("too slow", 0.0, "timeout")
    assert latex._best([0.0, 1.0, hung]) == 1.0
    assert latex._best([0.0, hung]) is hung
    assert latex._best([None, 0.0]) == 0.0
    assert latex._best([None, None]) is None
