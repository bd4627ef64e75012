"""The numbers that the article prints or that were measured on its functions, for its rewards."""

import pytest

from grpo_jax.rewards.article import correctness, count_xml, extract_xml_answer

GOOD = "<reasoning>\n2 + 2*3 = 2 + 6 = 8\n</reasoning>\n<answer>\n8\n</answer>\n"
BAD = "<reasoning>\nadd first: 4*3 = 12\n</reasoning>\n<answer>\n12\n</answer>\n"
CLEAN = "<reasoning>\nwork\n</reasoning>\n<answer>\n8\n</answer>\n"


def test_the_printed_extractions():
    assert extract_xml_answer(GOOD) == "8"
    assert extract_xml_answer(BAD) == "12"


def test_the_printed_correctness():
    assert correctness(GOOD, "8") == 2.0
    assert correctness(BAD, "8") == 0.0


def test_the_printed_partial_credit():
    assert round(count_xml(CLEAN), 4) == 0.5
    assert round(count_xml(CLEAN + "thanks for asking!!"), 4) == 0.462


@pytest.mark.parametrize(
    ("text", "credit"),
    [
        (CLEAN, 0.5),
        (CLEAN.removesuffix("\n"), 0.451),  # the flaw: all 50 characters are charged
        (CLEAN.removesuffix("\n").replace("work", "x" * 1000), -0.545),
        (CLEAN + "x" * 19, 0.462),
        (CLEAN + "x" * 1000, -1.5),
        (CLEAN + "<answer>\n9\n</answer>\n", 0.25),
        (CLEAN.replace("8", ""), 0.5),
        ("8", 0.0),
        (CLEAN.replace("\n", "\r\n"), 0.124),
        ("<answer>7</answer><answer>9</answer>", 0.0),
        # The tag's final newline is also the next tag's first: a split from the left sees one tag.
        (CLEAN + "</answer>\n", 0.375 - 0.01),
    ],
)
def test_the_measured_partial_credit(text, credit):
    assert count_xml(text) == pytest.approx(credit, abs=1e-9)
