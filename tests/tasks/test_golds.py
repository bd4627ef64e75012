from types import SimpleNamespace

import pytest

from grpo_jax import rewards
from grpo_jax.rewards import numeric
from grpo_jax.tasks import golds


@pytest.mark.parametrize(
    ("gold", "clean"),
    [
        (142.0, "142"),
        (-3.0, "-3"),
        (0.5, "0.5"),
        (70, "70"),
        ("025", "25"),
        ("1,080", "1080"),
        ("$1,080.", "1080"),
        ("\\$18", "18"),
        ("18.00", "18"),
        ("-2.50", "-2.50"),
        ("−5", "-5"),
        ("\\text{13}", "13"),
        ("10,\\!080", "10080"),
        ("11,\\! 111,\\! 100", "11111100"),
        ("32{,}348", "32348"),
        (" 9.6\n", "9.6"),
        # what stays as it is
        ("10\\%", "10\\%"),
        ("50%", "50%"),
        ("1,2", "1,2"),  # two answers
        ("3, 5, 7", "3, 5, 7"),
        ("1,23,4", "1,23,4"),
        ("\\frac{14}{3}", "\\frac{14}{3}"),
        ("5.4 \\text{ cents}", "5.4 \\text{ cents}"),
        ("\\text{east}", "\\text{east}"),
        ("1, 2, ...", "1, 2, ..."),
        # delimiters
        ("$\\frac{1}{2 n+2}$", "\\frac{1}{2 n+2}"),
        ("\\(x+1\\)", "x+1"),
        ("\\[ x \\]", "x"),
        ("\\(a\\), \\(b\\)", "\\(a\\), \\(b\\)"),
        ("$69$,$84$", "69,84"),
        ("$a=2$, $a=-6-4 \\sqrt{2}$", "a=2, a=-6-4 \\sqrt{2}"),
        ("$(-\\infty, 0) \\cup\\{1\\}$.", "(-\\infty, 0) \\cup\\{1\\}"),
        ("$f(x)=a$, where $b$ is any", "$f(x)=a$, where $b$ is any"),
        ("$221,$8$", "$221,$8$"),
        ("\\$3 and $4", "\\$3 and $4"),
        # nothing
        ("  ", ""),
        (None, ""),
        (float("nan"), ""),
        (float("inf"), ""),
    ],
)
def test_clean(gold, clean):
    assert golds.clean(gold) == clean
    assert golds.clean(clean) == clean  # once is enough


def test_clean_keeps_the_value():
    for gold in ("$1,080.", "\\text{13}", "10,\\!080", "-2.50", "−5", "007", ".5", "\\$0.50"):
        assert numeric.parse(golds.clean(gold)) == numeric.parse(gold)


@pytest.mark.parametrize(
    ("gold", "good"),
    [
        ("\\frac{1}{2}", True),
        ("\\{1, 2\\}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("x \\leftarrow y", True),  # no \left
        ("\\$5", True),
        ("", False),
        ("\\frac{1}{2", False),
        ("}{", False),
        ("\\left( 3", False),
        ("$221,$8$", False),
        ("x" * 301, False),
    ],
)
def test_well_formed(gold, good):
    assert golds.well_formed(gold) == good


def test_numeric_golds():
    assert golds.readable(["5", "1/2", "many", ""], "numeric", True) == [True, True, False, False]


def test_latex_golds_are_shown_to_math_verify_once_each(monkeypatch):
    asked = []

    def readable(texts, settings):
        assert settings["seconds"] >= 30  # a busy machine must not decide
        asked.extend(texts)
        return [text != "\\odd" for text in texts]

    monkeypatch.setattr(
        rewards, "latex", SimpleNamespace(readable=readable, Latex=dict), raising=False
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    some = ["x+1", "5", "\\odd", "{", "x+1"]
    assert golds.readable(some, "latex", True) == [True, True, False, False, True]
    assert asked == ["x+1", "\\odd"]
    assert golds.readable(some, "latex", False) == [True, True, True, False, True]
    assert asked == ["x+1", "\\odd"]


def test_without_the_extra_the_form_decides(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert golds.readable(["x+1", "{"], "latex", True) == [True, False]


def test_unknown_kind():
    with pytest.raises(ValueError, match="'words'; there are numeric, latex"):
        golds.readable([], "words", True)
