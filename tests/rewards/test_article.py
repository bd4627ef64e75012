import random
import re
import time

import pytest

from grpo_jax.rewards import article

CLEAN = "<reasoning>\nl1\nl2\n</reasoning>\n<answer>\n8\n</answer>\n"


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        (CLEAN, 0.5, 0.5),  # two lines of reasoning: needs DOTALL
        (CLEAN.removesuffix("\n"), 0.0, 0.5),
        (CLEAN + "\n", 0.5, 0.5),  # `$` matches before a last newline
        (CLEAN + "bye", 0.0, 0.5),
        ("so: " + CLEAN, 0.0, 0.0),  # both start at the start
        (CLEAN.replace("\n", ""), 0.0, 0.5),
        (CLEAN.replace("\n", "\r\n"), 0.0, 0.5),
        (CLEAN.replace("</answer>", ""), 0.0, 0.0),
        (CLEAN.replace("</reasoning>\n", "</reasoning>\nso\n"), 0.0, 0.0),
        ("8", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_formats(text, strict, soft):
    assert article.strict_format(text, "8") == strict
    assert article.soft_format(text, "8") == soft


def test_atomic_groups_match_what_the_plain_patterns_match():
    plain_strict = re.compile(
        r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", re.DOTALL
    )
    plain_soft = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
    rng = random.Random(0)
    pieces = re.findall(r"</?\w+>|[^<]", CLEAN)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        parts = list(pieces)
        for _ in range(rng.randint(0, 4)):
            position = rng.randrange(len(parts))
            parts[position : position + rng.randint(0, 1)] = [rng.choice(pieces)]
        text = "".join(parts)
        strict = plain_strict.match(text) is not None
        assert (article.strict_format(text, "") == 0.5) == strict
        assert (article.soft_format(text, "") == 0.5) == (plain_soft.match(text) is not None)
        seen[strict] += 1
    assert min(seen.values()) > 300


@pytest.mark.parametrize(
    "text",
    [
        "<reasoning>\n" + "\n</reasoning>\n<answer>\n" * 5000,
        "<reasoning>\n" + "</reasoning>" * 10000 + " " * 10000,
        "<reasoning>" + ("</reasoning>" + " " * 100) * 1000,
    ],
)
def test_formats_take_linear_time(text):
    start = time.perf_counter()
    article.strict_format(text, "7")
    article.soft_format(text, "7")
    assert time.perf_counter() - start < 0.5  # the plain patterns need seconds for the first


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        ("<answer>7</answer><answer>9</answer>", "9"),
        ("8", "8"),
        ("<Answer>\n8\n</Answer>", "<Answer>\n8\n</Answer>"),
        ("<answer>\n8", "8"),
        ("<answer>\r\n8\r\n</answer>", "8"),
        ("<answer></answer>", ""),
        ("8</answer> 9", "8"),
    ],
)
def test_extraction(text, extracted):
    assert article.extract_xml_answer(text) == extracted


def test_correctness_has_the_loopholes_of_the_article():
    assert article.correctness("8", "8") == 2.0  # no tags
    assert article.correctness("<answer>\n8", "8") == 2.0  # cut off
    assert article.correctness("<Answer>\n8\n</Answer>", "8") == 0.0
    assert article.correctness("<answer>8.0</answer>", "8") == 0.0  # text, not numbers
    assert article.correctness("<answer></answer>", "") == 2.0


@pytest.mark.parametrize(
    ("answer", "reward"), [("8", 0.5), ("08", 0.5), ("-8", 0), ("8.0", 0), ("1,234", 0), ("", 0)]
)
def test_integer(answer, reward):
    assert article.integer(f"<answer>\n{answer}\n</answer>", "8") == reward
    assert article.integer("+8", "8") == 0


def test_a_perfect_completion_earns_the_sum_of_the_five():
    five = (
        article.xmlcount,
        article.soft_format,
        article.strict_format,
        article.integer,
        article.correctness,
    )
    assert [reward(CLEAN, "8") for reward in five] == [0.5, 0.5, 0.5, 0.5, 2.0]
