"""Bugs reported in public against other codebases, with what is right: rewards, answer checking.

`pytest -k R16b` runs a case. Those that are answers to a gold are rows of `ANSWERS`: the gold, what
is answered, and what the numeric rewards and the LaTeX reward make of it (1, 0, or None for
unscorable). The others are tests whose docstring names the reports. Where trusted tools differ, the
policy of docs/rewards.md is what is tested.
"""

import re
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from grpo_jax.rewards import article, numeric
from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.rewards.latex import Latex
from grpo_jax.rewards.workers import Failure
from tests.rewards.judges import HASTY, JUDGE, judged

# Every id of the collection that concerns rewards.
IDS = (
    *(
        "R1a",
        "R1b",
        "R1c",
        "R2a",
        "R2b",
        "R2c",
        "R2d",
        "R2e",
        "R2f",
        "R3",
        "R5",
        "R5z",
        "R6",
        "R6z",
    ),
    *(
        "R7",
        "R8",
        "R11",
        "R12",
        "R13",
        "R14",
        "R15a",
        "R15b",
        "R16a",
        "R16b",
        "R16c",
        "R19a",
        "R20",
    ),
    *("R21a", "R21b", "R21c", "R21d", "R23", "R24", "R26", "R28"),
)
# id -> (gold, answers, numeric, latex)
ANSWERS = {
    "R1a": ("1234", ["1,234"], 1, 1),
    "R1b": ("1,234", ["1234", "1,234"], 1, 1),
    "R1c": ("1234", ["1,23,4"], 0, 0),
    "R2a": ("18", ["$18"], 1, 1),
    "R2b": ("18", ["\\$18"], 1, 1),
    "R2c": ("29", ["$29.00."], 1, 1),
    "R2d": ("72", ["72.0"], 1, 1),
    "R2e": ("8", ["08"], 1, 1),
    "R2f": ("18", ["18\\text{ dollars}"], 0, 1),  # policy: words are no number; LaTeX drops units
    "R5z": ("5", ["", "nan", "inf", "\\boxed{}"], 0, 0),
    "R6z": ("", ["", "5"], None, None),
    "R15a": ("50", ["50%", "50\\%"], 1, 1),  # policy: a unit
    "R15b": ("0.5", ["50%", "50\\%"], 0, 0),
    "R16a": ("-5", ["−5"], 1, 1),
    "R16b": ("-5", ["- 5"], 1, 1),
    "R16c": ("-5", ["5"], 0, 0),
    "R19a": ("12345678901234567890", ["12345678901234567891"], 0, 0),
    "R21a": ("1/2", ["\\frac12", "$\\frac12$"], 1, 1),
    "R21b": ("0.5", [".5", "1/2", "\\dfrac{1}{2}"], 1, 1),
    "R21c": ("\\frac{\\pi}{2}", ["pi/2"], None, 1),  # policy: the same in substance
    "R21d": ("13", ["\\text{13}", "$\\text{13}$", "\\boxed{\\text{13}}"], 1, 1),
}
CLEAN = "<reasoning>\nl1\nl2\n</reasoning>\n<answer>\n8\n</answer>\n"
HOSTILE = (
    "\\boxed{\\dfrac{5^{5^{5^{5^{5}}}} - 5}{16}}",
    "9**9**9**9",
    "$(10^9)!$",
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "2**100000000",
    "__import__('os').getpid()",
)
# as the LaTeX reward gets them, with what else has been thought of
WORSE = (
    *(text.removeprefix("\\boxed{").removesuffix("}") for text in HOSTILE),
    "__import__('os').system('touch F')",
    "().__class__.__bases__[0].__subclasses__()",
    "9^{9^{9^{9}}}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "(((10!)!)!)!",
    "\\binom{10^9}{5\\cdot 10^8}",
    "7^{7^{7^7}} \\pmod{10}",
    "x^{x^{x^{x^{x^x}}}}",
    "\\log_{2}{2^{2^{40}}}",
    "(" + "+".join(f"x_{{{i}}}" for i in range(60)) + ")^{50}",
    "\\frac{1}{" * 30 + "2" + "}" * 30,
    "(" * 35 + "1" + ")" * 35,
    "1e9999999",
    "9" * 900,
    "9" * 5000,
    "\\boxed{" * 10_000,
    "1" * 10_000_000,
    "\x00",
    "\ud800",
    "\u202e7",
    "７",
    "",
)


def test_every_case_is_tested():
    tested = {name.split("_")[1] for name in globals() if re.match(r"test_R\d", name)}
    assert sorted({*ANSWERS, *tested}) == sorted(IDS)


@pytest.mark.parametrize("case", ANSWERS)
def test_answers(case):
    gold, answers, right, _ = ANSWERS[case]
    for answer in answers:
        assert numeric.matches(answer, gold) == bool(right)
        assert numeric.correct(f"<answer>\n{answer}\n</answer>", gold) == right
        assert numeric.plain(answer, gold) == right
        assert numeric.boxed(f"\\boxed{{{answer}}}", gold) == right


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_in_latex(case):
    gold, answers, _, right = ANSWERS[case]
    every = tuple((gold, answer) for gold, answers, *_ in ANSWERS.values() for answer in answers)
    table = judged(every)  # once for all cases
    assert [table[gold, answer] for answer in answers] == [right] * len(answers)


# -------------------------------------------------------------------- tags, as the article has them


def test_R3_a_comma_is_no_number():
    """jundot/omlx#3484, stanford-crfm/helm#4337."""
    texts = (
        "The total is 72 clips, altogether.",
        "The answer is 72, in total, so she earns that much.",
    )
    for text in texts:
        assert numeric.last_number(text, "72") == 1.0
        assert re.findall(r"-?[\d,]+", text)[-1] == ","  # the usual pattern


def test_R5_several_answer_blocks():
    """huggingface/open-r1#418. Policy: blocks that disagree are wrong (the article: the last)."""
    text = "<answer>7</answer><answer>9</answer>"
    assert article.extract_xml_answer(text) == "9"
    assert article.soft_format(text, "9") == numeric.tag_format(text, "9") == 0.0
    assert article.count_xml(CLEAN + "<answer>\n9\n</answer>\n") == 0.25
    assert numeric.correct(text, "9") == numeric.correct(text, "7") == 0.0
    assert Latex(**{**vars(JUDGE), "answer_in": "blocks"})(text, "9") == 0.0


def test_R6_no_tags():
    """The article takes the whole text, and pays an open block; the default wants it closed."""
    for text, paid in (("8", 2.0), ("<Answer>\n8\n</Answer>", 0.0), ("<answer>\n8", 2.0)):
        assert article.correctness(text, "8") == paid
        assert numeric.correct(text, "8") == 0.0
    assert article.extract_xml_answer("<Answer>\n8\n</Answer>") == "<Answer>\n8\n</Answer>"
    assert JUDGE("8", "8") == JUDGE("\\boxed{8", "8") == 0.0


def test_R7_the_end_of_the_text_is_not_charged():
    """ZHZisZZ/dllm#118."""
    bare = CLEAN.replace("l1\nl2", "work").removesuffix("\n")
    as_printed = {
        bare + "\n": 0.5,
        bare: 0.451,
        bare.replace("work", "x" * 1000): -0.545,
        bare + "\n" + "x" * 19: 0.462,
        bare + "\n" + "x" * 1000: -1.5,
        bare + "\n<answer>\n9\n</answer>\n": 0.25,
        bare.replace("8", "") + "\n": 0.5,
        "8": 0.0,
    }
    for text, value in as_printed.items():
        assert article.count_xml(text) == pytest.approx(value, abs=1e-9)
    mended = {bare: 0.5, bare + "\n": 0.5, bare + "x" * 19: 0.481, bare + "x" * 1000: 0.0}
    for text, value in mended.items():
        assert numeric.tag_count(text, "8") == pytest.approx(value, abs=1e-9)


def test_R8_reasoning_of_several_lines():
    """unslothai/unsloth#1761."""
    assert article.strict_format(CLEAN, "8") == article.soft_format(CLEAN, "8") == 0.5
    assert numeric.tag_format(CLEAN, "8") == 1.0


def test_R24_carriage_returns():
    """pytorch/rl#3542."""
    crlf = CLEAN.replace("\n", "\r\n")
    assert article.count_xml(crlf) == pytest.approx(0.124) and article.strict_format(crlf, "8") == 0
    for reward in (numeric.correct, numeric.tag_format, numeric.tag_count, numeric.is_number):
        assert reward(crlf, "8") == reward(CLEAN, "8") > 0
    assert JUDGE("so\r\n\\boxed{x +\r\n1}\r\n", "x+1") == 1.0


def test_R26_what_is_a_number():
    """`str.isdigit` refuses -8, 8.0, 1,234 and +8."""
    for answer in ("-8", "8.0", "1,234", "+8"):
        text = f"<answer>\n{answer}\n</answer>"
        assert article.integer(text, "8") == 0.0 and numeric.is_number(text, "8") == 1.0


# ----------------------------------------------------------------------------- golds and failures


def test_R11_a_gold_that_cannot_be_read():
    """huggingface/open-r1#86 #293 #215 #566: it must not be worth 1."""
    for gold in ("", "\\frac{1}{0}", "{5"):
        for reward in (numeric.correct, numeric.boxed, JUDGE):
            assert reward(f"\\boxed{{{gold}}}<answer>{gold}</answer>", gold) is None
    table = score([RewardPart("latex", JUDGE)], ["\\boxed{x}"] * 2, ["x", "{5"])
    assert table.total[0] == 1 and np.isnan(table.total[1])
    assert table.unscorable == {"latex": 1} and table.failed == {"latex": 0}


CASE = (r"so \boxed{\frac{1}{3}}, <answer>\boxed{\frac{1}{3}}</answer>", "1/3")
SYMBOLS = (r"\boxed{\frac{x}{3}}", "x/3")


def test_R12_the_same_in_threads_and_processes():
    """verl-project/verl#5635, Math-Verify#50 #55, trl#5281: alarms work in main threads only."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(f, *CASE) for f in (numeric.correct, numeric.boxed, JUDGE)]
        futures += [pool.submit(JUDGE, *SYMBOLS)]
        assert [future.result() for future in futures] == [1.0] * 4
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(f, *CASE) for f in (numeric.correct, numeric.boxed)]
        futures += [pool.submit(JUDGE, *SYMBOLS)]  # which has workers of its own there
        assert [future.result(timeout=200) for future in futures] == [1.0] * 3


def test_R14_nothing_is_executed(tmp_path, monkeypatch):
    """THUDM/slime#1586, sympy/sympy#10805 #24990 #27763, morluto/jacobian#2125."""
    monkeypatch.chdir(tmp_path)  # of this process; a worker can't write files anywhere
    answers = [
        f"__import__('os').system('touch {tmp_path}/F')",
        f"open('{tmp_path}/F', 'w')",
        "().__class__.__bases__[0].__subclasses__()",
    ]
    for answer in answers:
        assert numeric.correct(f"<answer>{answer}</answer>", "7") == 0.0
        assert numeric.boxed(f"\\boxed{{{answer}}}", "7") == 0.0
    for gold in ("7", "x^2"):
        scores = JUDGE.batch([f"\\boxed{{{a}}}" for a in answers], [gold] * len(answers))
        assert scores == [0.0] * len(answers)
    assert list(tmp_path.iterdir()) == []


def test_R20_the_order_of_the_arguments():
    """open-r1#557, scitix/sieval#18, Math-Verify#10: an interval answers an inequality."""
    pair = ("$0<x<12.5$", "$(0,12.5)$")
    assert judged((pair, pair[::-1])) == {pair: 1.0, pair[::-1]: 0.0}


class Batch:
    """A reward for all rows at once, which gives back what it is told to."""

    def __init__(self, values):
        self.values = values

    def __call__(self, completion, answer):
        raise NotImplementedError

    def batch(self, completions, answers):
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


def test_R23_a_reward_that_raises_or_miscounts():
    """skypilot-org/skypilot#9836, trl#3079."""
    rows = ["a", "b", "c", "d"]
    # that the run goes on with the other three is in test_rollout.py
    table = score([RewardPart("mine", lambda c, a: 1 / (c != "b"))], rows, rows)
    np.testing.assert_array_equal(table.total, np.float32([1, np.nan, 1, 1]))
    assert table.failed == {"mine": 1} and "ZeroDivisionError" in table.errors["mine"]
    table = score(
        [RewardPart("mine", Batch([1.0, Failure("it hung", 0.0), None, 0.5]))], rows, rows
    )
    np.testing.assert_array_equal(table.total, np.float32([1, 0, np.nan, 0.5]))
    assert table.failed == {"mine": 1} and table.unscorable == {"mine": 1}
    table = score([RewardPart("mine", Batch(KeyError("all of them")))], rows, rows)
    assert table.failed == {"mine": 4} and "KeyError: 'all of them'" in table.errors["mine"]
    with pytest.raises(ValueError, match=r"'mine' .*Batch.batch\) returned 3 values for 4 compl"):
        score([RewardPart("mine", Batch([1.0] * 3))], rows, rows)


# -------------------------------------------------------------------------------- hostile answers


def test_R13_sixty_four_hostile_rows_numeric():
    """Math-Verify#65 #63 #59, verl#5839, areal-project/AReaL#1426, and the measured table."""
    rows = [f"<answer>{t}</answer> \\boxed{{{t}}}" for t in (*HOSTILE, *WORSE)] * 2
    rows = (rows + rows)[:64]
    parts = [
        RewardPart(f.__name__, f)
        for f in (numeric.correct, numeric.plain, numeric.boxed, numeric.last_number)
    ]
    start = time.process_time()
    table = score(parts[:3], rows, ["7"] * 64)
    assert time.process_time() - start < 2.0  # 0.2 s on an idle machine
    assert not table.total.any() and set(table.failed.values()) == {0}
    assert score(parts, [CLEAN + "\\boxed{8}"], ["8"]).parts["boxed"].tolist() == [1.0]


def test_R13_a_few_hostile_rows_latex():
    """Fast ones, and one that hangs: the next batch is as ever."""
    quick = [t for t in WORSE if len(t) > 1000 or not re.search(r"[0-9^!]", t)]
    rows = [f"\\boxed{{{t}}}" for t in (*quick, "(((10!)!)!)!")]
    scores = HASTY.batch(rows, ["7"] * len(rows))
    assert scores[:-1] == [0.0] * len(quick) and scores[-1].kind == "timeout"
    assert scores[-1].value == 0.0
    assert HASTY.batch([SYMBOLS[0]], [SYMBOLS[1]]) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("gold", ["7", "\\frac{\\pi}{2}"])
def test_R13_sixty_four_hostile_rows_latex(gold):
    """All 0 within the bound, whichever rows hang, and the next batch is as ever."""
    texts = [f"{text}+{i}" if text else text for i in range(3) for text in WORSE]
    rows = [f"\\boxed{{{text}}}" for text in texts[:64]]  # no two alike
    judge = Latex(workers=2, seconds=1.0, batch_seconds=40.0)
    assert judge.batch([SYMBOLS[0]], [SYMBOLS[1]]) == [1.0]
    start = time.monotonic()
    scores = judge.batch(rows, [gold] * 64)
    assert time.monotonic() - start < 42.0
    assert [s.value if isinstance(s, Failure) else s for s in scores] == [0.0] * 64
    assert judge.batch([SYMBOLS[0]], [SYMBOLS[1]]) == [1.0]


@pytest.mark.parametrize("text", ["1e9999999", "9" * 5000, "1e" + "9" * 60, "-1e-9999999"])
def test_R28_caps_come_before_conversion(text):
    """QWED-AI/qwed-verification#331: int and Fraction of these take seconds, or raise."""

    def seconds():
        start = time.perf_counter()
        assert numeric.parse(text) is None
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 1e-3
    assert numeric.correct(f"<answer>{text}</answer>", "7") == 0.0
    assert JUDGE(f"\\boxed{{{text}}}", "7") == 0.0
