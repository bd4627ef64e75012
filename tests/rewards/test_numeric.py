import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax.rewards import article, numeric
from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.rewards.numeric import matches, parse

CLEAN = "<reasoning>\nl1\nl2\n</reasoning>\n<answer>\n8\n</answer>\n"

EQUAL = [
    ("1234", "1,234"),
    ("1,234", "1234"),
    ("1234567", "1,234,567"),
    ("1234", "1{,}234"),
    ("10080", "10,\\!080"),
    ("18", "$18"),
    ("18", "\\$18"),
    ("18", "$18$"),
    ("18", "$\\$18$"),
    ("18", "$$18$$"),
    ("18", "\\(18\\)"),
    ("18", "\\[ 18 \\]"),
    ("18", "**18**"),
    ("18", "  18\n"),
    ("18", "18."),
    ("18", "$18$."),
    ("29", "$29.00."),
    ("72", "72.0"),
    ("8", "08"),
    ("8", "+8"),
    ("-5", "−5"),
    ("-5", "- 5"),
    ("-5", "-$5"),
    ("-5", "$-5"),
    ("-5", "−\\$5.00"),
    ("0.5", ".5"),
    ("0.5", "1/2"),
    ("0.5", "1 / 2"),
    ("0.5", "\\dfrac{1}{2}"),
    ("0.5", "\\tfrac{1}{2}"),
    ("1/2", "$\\frac12$"),
    ("1/2", "\\frac{1}{2}"),
    ("1/2", "\\frac1{2}"),
    ("1/2", "\\frac 12"),
    ("1/2", "$\\frac{ 2 }{4}$."),
    ("-1/2", "-\\frac{1}{2}"),
    ("-1/2", "\\frac{-1}{2}"),
    ("1/3", "\\boxed{\\frac{1}{3}}"),
    ("13", "$\\text{13}$"),
    ("13", "\\boxed{\\text{13}}"),
    ("13", "\\boxed{13}."),
    ("13", "\\mathbf{13}"),
    ("1000", "1e3"),
    ("0.0015", "1.5E-3"),
    ("50", "50%"),  # policy: percent is a unit
    ("50", "$50\\%$"),
    ("50%", "50"),
    ("12345678901234567890", "12,345,678,901,234,567,890"),
    ("0", "-0"),
]

UNEQUAL = [
    ("1234", "1,23,4"),
    ("1234", "12,34"),
    ("1234", ",1234"),
    ("123", "0,123"),
    ("1234", "1 234"),
    ("1234", "1_234"),
    ("-5", "5"),
    ("5", "--5"),
    ("-5", "-$-5"),
    ("12345678901234567890", "12345678901234567891"),  # equal as floats
    ("0.1", "0.1000000000000000055511151231257827"),  # equal as floats
    ("0.5", "50%"),  # policy: never both
    ("18", "18 dollars"),  # policy: words are refused
    ("18", "18 or 19"),
    ("18", "18, 19"),
    ("8", "8 8"),
    ("18", "１８"),  # policy: ASCII digits
    ("2", "²"),
    ("3/2", "1 1/2"),
    ("3/2", "1\\frac{1}{2}"),
    ("5", "x = 5"),
    ("5", "2+3"),
    ("5", "5!"),
    ("5", "5.."),
    ("5", ".5."),
    ("5", "\\boxed{5"),
    ("5", "\\boxed{5}+\\boxed{6}"),
    ("5", "\\boxed{}"),
    ("5", ""),
    ("5", "nan"),
    ("5", "inf"),
    ("5", "-"),
    ("5", "."),
    ("5", "$"),
    ("5", "5/0"),
    ("5", "\\frac50"),
    ("0", "0/0"),
    ("26", "0x1a"),
    ("100", "1e2.0"),
]

HOSTILE = [
    "\\boxed{\\dfrac{5^{5^{5^{5^{5}}}} - 5}{16}}",
    "9**9**9**9",
    "$(10^9)!$",
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "2**100000000",
    "__import__('os').getpid()",
    "().__class__.__bases__[0].__subclasses__()",
    "1e9999999",
    "1e-9999999",
    "1e" + "9" * 60,
    "9" * 5000,
    "9" * 100_000,
    "9," * 50_000,
    "1/" * 50_000,
    "1e1" * 30_000,
    "." * 100_000,
    "-" * 100_000 + "5",
    "$" * 100_000,
    "*" * 100_000,
    " " * 100_000 + "x",
    "\\frac{" * 20_000,
    "\\frac{" + "9" * 100_000,
    "\\boxed{" * 15_000 + "5" + "}" * 15_000,
    "{,}" * 30_000,
    "<answer>" * 12_000,
    "</answer>" * 12_000,
    "<answer></answer>" * 6_000,
    "<reasoning>\n" + "\n</reasoning>\n<answer>\n" * 4_000,
    "\x00\ud800\u202e７",
    "nan",
    "",
    "\\boxed{}",
]

EVERY_REWARD = [
    numeric.correct,
    numeric.plain,
    numeric.boxed,
    numeric.last_number,
    numeric.is_number,
    numeric.tag_format,
    numeric.tag_count,
    article.xmlcount,
    article.soft_format,
    article.strict_format,
    article.integer,
    article.correctness,
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold, answer):
    assert matches(answer, gold)
    assert matches(gold, answer)
    assert numeric.correct(f"<answer>\n{answer}\n</answer>", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal(gold, answer):
    assert not matches(answer, gold)
    assert not matches(gold, answer)
    assert numeric.correct(f"<answer>\n{answer}\n</answer>", gold) == 0.0


def test_every_spelling_of_a_random_rational_is_read_exactly():
    rng = random.Random(0)
    for _ in range(500):
        top, bottom, cents = rng.randrange(10**12), rng.randint(1, 10**6), rng.randrange(100)
        ratio = Fraction(top, bottom)
        assert parse(f"{top}/{bottom}") == parse(f"\\frac{{{top}}}{{{bottom}}}") == ratio
        assert parse(f"-{top:,} / {bottom:,}") == -ratio
        assert parse(f"\\boxed{{\\${top:,}.{cents:02}}}.") == top + Fraction(cents, 100)
        assert parse(f"{top}e-{cents % 30}") == Fraction(top, 10 ** (cents % 30))


def test_parse_never_raises_and_the_grammar_is_closed():
    rng = random.Random(1)
    alphabet = ["1", "0", "23", ",", ".", "-", "−", "/", "e", "$", "%", " ", "{", "}", "\\frac"]
    alphabet += ["\\boxed{", "\\text{", "*", "(", "x", "\n", "_"]
    read = 0
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 8)))
        value = parse(text)
        read += value is not None
        if value is not None:
            assert not set(text) & set("(_")
    assert read > 300


def test_caps_on_length_and_exponent():
    assert parse("1" * 64) == int("1" * 64)
    assert parse("1" * 65) is None
    assert parse("1e30") == 10**30
    assert parse("1e-30") == Fraction(1, 10**30)
    assert parse("1e31") is None
    assert parse("1e-31") is None


@pytest.mark.parametrize("text", ["1e9999999", "-1e-9999999/1", "9" * 5000, "1e" + "9" * 62])
def test_compute_bombs_cost_less_than_a_millisecond(text):
    def seconds():
        start = time.perf_counter()
        assert parse(text) is None
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 1e-3


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (CLEAN, 1.0),
        (CLEAN.replace("\n", "\r\n"), 1.0),
        (CLEAN.removesuffix("\n"), 1.0),
        ("I think <answer>8.00</answer> is it", 1.0),
        ("<answer>8</answer><answer>8.0</answer>", 1.0),  # blocks that agree
        ("<answer>7</answer><answer>8</answer>", 0.0),  # policy: blocks that disagree
        ("<answer>8</answer><answer>7</answer>", 0.0),
        ("<answer>8</answer><answer>", 0.0),
        ("8", 0.0),
        ("<answer>\n8", 0.0),  # cut off
        ("8</answer>", 0.0),
        ("<answer><answer>8</answer>", 0.0),
        ("</answer>8<answer>", 0.0),
        ("<Answer>\n8\n</Answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>8 or 9</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_correct(completion, reward):
    assert numeric.correct(completion, "8") == reward


@pytest.mark.parametrize("gold", ["", " ", "eight", "\\frac{1}{0}", "(1, 2)", "1e99"])
def test_unreadable_gold_is_unscorable_and_never_right(gold):
    for reward in (numeric.correct, numeric.plain, numeric.boxed, numeric.last_number):
        assert reward(f"<answer>{gold}</answer>", gold) is None
        assert reward(gold, gold) is None
    assert not matches(gold, gold)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(" 8\n", 1.0), ("8.", 1.0), ("8\r\n", 1.0), ("8 9", 0.0), ("It is 8", 0.0), ("", 0.0)],
)
def test_plain(completion, reward):
    assert numeric.plain(completion, "8") == reward


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("48 / 2 = 24\n#### 72", "72", 1.0),
        ("#### 72\n\nQuestion: 5 + 5?\n#### 10", "72", 1.0),  # the first marker
        ("#### 10\n#### 72", "72", 0.0),
        ("####\n72", "72", 1.0),
        ("#### $1,234 clips", "1234", 1.0),
        ("The answer is 72 ####", "72", 0.0),  # a marker with nothing behind
        ("The total is 72 clips, altogether.", "72", 1.0),
        ("The answer is 72, in total, so she earns that much.", "72", 1.0),
        ("First 5, then 72.", "72", 1.0),
        ("72, then 5", "72", 0.0),
        ("so -5", "-5", 1.0),
        ("so it is −$5.", "-5", 1.0),
        ("77-5", "5", 1.0),  # a subtraction, not a sign
        ("(3)-5", "5", 1.0),
        ("thus \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("thus 1/2", "0.5", 1.0),
        ("it costs $29.00.", "29", 1.0),
        ("that makes 50%", "50", 1.0),
        ("10{,}080 ways", "10080", 1.0),
        ("12, not 1,23,4", "12", 0.0),  # malformed: not skipped
        ("no number", "72", 0.0),
        (", , ,", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_last_number(completion, gold, reward):
    assert numeric.last_number(completion, gold) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("-8", 1), ("−8", 1), ("8.0", 1), ("1,234", 1), ("+8", 1), ("eight", 0), ("1,23", 0), ("", 0)],
)
def test_is_number(answer, reward):
    assert numeric.is_number(f"<answer>\n{answer}\n</answer>", "5") == reward
    assert numeric.is_number(answer, "5") == 0
    assert numeric.is_number(f"<answer>{answer}", "5") == 0


@pytest.mark.parametrize(
    ("completion", "whole", "partial"),
    [
        (CLEAN, 1.0, 0.5),
        (CLEAN.replace("\n", "\r\n"), 1.0, 0.5),
        (CLEAN.replace("\n", ""), 1.0, 0.5),
        (CLEAN.removesuffix("\n"), 1.0, 0.5),
        (CLEAN.removesuffix("\n").replace("l1", "x" * 1000), 1.0, 0.5),
        (CLEAN + "x" * 19, 1.0, 0.481),
        (CLEAN + "x\ny", 1.0, 0.497),
        (CLEAN + "x\r\ny", 1.0, 0.497),
        (CLEAN + "x" * 1000, 1.0, 0.0),
        (CLEAN.replace("8", ""), 1.0, 0.5),
        (CLEAN + "<answer>\n9\n</answer>\n", 0.0, 0.25),
        ("<answer>7</answer><answer>9</answer>", 0.0, 0.0),
        ("<answer>8</answer><reasoning>l1</reasoning>", 0.0, 0.475),
        ("<reasoning>l1</reasoning>\n<answer>8", 0.0, 0.375),
        ("<reasoning><answer>8</reasoning></answer>", 0.0, 0.5),  # order is tag_format's business
        ("8", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_mended_formats(completion, whole, partial):
    assert numeric.tag_format(completion, "8") == whole
    assert numeric.tag_count(completion, "8") == pytest.approx(partial, abs=1e-9)


def test_a_batch_of_hostile_answers_is_wrong_and_cheap():
    rows = HOSTILE + [f"<answer>\n{text}\n</answer>" for text in HOSTILE]
    assert len(rows) == 64
    parts = [RewardPart(f"{f.__module__}.{f.__name__}", f) for f in EVERY_REWARD]
    start = time.process_time()  # of this process: others may keep the machine busy
    table = score(parts, rows, ["7"] * len(rows))
    assert time.process_time() - start < 2.0
    for name in ("correct", "plain", "boxed", "last_number"):
        assert not table.parts[f"grpo_jax.rewards.numeric.{name}"].any()
    assert set(table.failed.values()) == {0}
    assert numeric.correct(CLEAN, "8") == 1.0  # and the next batch is as before


def test_nothing_is_executed(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a reward evaluated code")

    target = tmp_path / "F"
    answers = [
        f"__import__('os').system('touch {target}')",
        f"open('{target}', 'w')",
        "().__class__.__bases__[0].__subclasses__()",
        "exit()",
    ]
    monkeypatch.setattr("builtins.eval", refuse)
    monkeypatch.setattr("builtins.exec", refuse)
    rewards = [f(f"<answer>{a}</answer>", "7") for f in EVERY_REWARD[:4] for a in answers]
    monkeypatch.undo()
    assert rewards == [0.0] * len(rewards)
    assert not target.exists()


def test_same_rewards_in_threads():
    cases = [(f"<answer>{a}</answer>", g) for g, a in EQUAL + UNEQUAL]
    cases.append(("<answer>\\boxed{\\frac{1}{3}}</answer>", "1/3"))
    here = [numeric.correct(*case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda case: numeric.correct(*case), cases)) == here
    assert here[-1] == 1.0


def test_same_reward_in_another_process_and_no_jax_there():
    code = (
        "import sys\n"
        "from grpo_jax.rewards import article, combine, numeric\n"
        r"reward = numeric.correct(r'<answer>\boxed{\frac{1}{3}}</answer>', '1/3')"
        "\n"
        "print(reward, 'jax' in sys.modules)"
    )
    root = Path(grpo_jax.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["1.0", "False"]
