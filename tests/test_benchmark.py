"""Benchmarks: batches, votes and numbers by hand; a bigram model asked in batches of any size."""

import json
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from grpo_jax import benchmark_report
from grpo_jax.benchmark.measure import by_level, measures, summary
from grpo_jax.benchmark.sampling import (
    GREEDY,
    MOST_SAMPLES,
    SAMPLED,
    Batch,
    Bench,
    BenchmarkSettings,
    batches,
    row_ids,
)
from grpo_jax.benchmark.votes import final_answer, vote
from tests.fixtures import CORRECT, bigram, certain, characters, make_task, table

SETTINGS = BenchmarkSettings(
    samples=3,
    greedy=True,
    pass_k=(1, 3),
    max_prompt_length=None,
    max_completion_length=6,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    batch_rows=64,
    seed=0,
)
TWENTY = make_task(heldout=make_task().heldout * 4)


@cache
def wavering():
    """After ":" comes any of 1, 2, x (can't be scored) and * (the scorer fails), then EOS."""
    logits = certain(colon="1")
    (colon,) = characters().encode(":")
    for character, logit in (("2", 0.5), ("x", -0.5), ("*", -0.5)):
        logits[colon, characters().encode(character)] = logit
    return table(logits)


@cache
def bench():
    """One for all tests: what it has compiled stays."""
    return Bench(bigram(), wavering(), characters(), [CORRECT], SETTINGS)


def ask(params=None, task=TWENTY, done=(), **settings):
    """All answers of a bigram model, by (mode, problem, sample), and the batches."""
    asked = replace(bench(), params=params or wavering(), settings=replace(SETTINGS, **settings))
    for sampler in asked._samplers.values():
        sampler.load(asked.params, 0)
    found = list(asked.run("stub", task, done))
    return {
        (batch["mode"], row["problem"], row["sample"]): row
        for batch in found
        for row in batch["rows"]
    }, found


# ------------------------------------------------------------------------------------- sampling


def test_what_is_sampled_does_not_depend_on_the_size_of_the_batches():
    whole, _ = ask()
    assert len(whole) == 20 * 3 + 20
    assert len({row["completion"] for row in whole.values()}) > 1
    # two problems a batch of nine rows, and more samples are more of the same
    sampled = {key: row for key, row in whole.items() if key[0] == SAMPLED}
    more, _ = ask(batch_rows=9, samples=4, greedy=False)
    assert len(more) == 20 * 4 and {key: more[key] for key in sampled} == sampled
    # a problem's samples don't fit into one batch
    assert ask(batch_rows=2, greedy=False)[0] == sampled
    assert ask(seed=1)[0] != whole


def test_an_answer_and_its_counts():
    rows, found = ask()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    one = next(row for row in rows.values() if row["completion"] == "1")
    expected = {"answer": "1", "completion": "1", "final_answer": "1", "correct": 1}
    expected |= {"reward": 1.0, "parts": {"correct": 1.0}, "length": 2}
    assert expected.items() <= one.items() and one["eos"] and not one["truncated"]
    assert rows[SAMPLED, 3, 0]["prompt"] == "d:" and "prompt" not in rows[SAMPLED, 3, 1]
    # greedy answers are 2, and wrong; an answer without a score is not right, and counted
    assert all(rows[GREEDY, n, 0]["completion"] == "2" for n in range(20))
    (sampled,) = (batch for batch in found if batch["mode"] == SAMPLED)
    for text, count in (("x", "unscorable"), ("*", "failed")):
        those = [row for row in sampled["rows"] if row["completion"] == text]
        assert those and sampled[count] == {"correct": len(those)}
        assert all(row["reward"] is None and row["correct"] == 0 for row in those)
    assert "a bad day" in sampled["errors"]["correct"]


def test_ends_of_answers():
    rows, _ = ask(table(certain(colon="a", a="a")), samples=0)  # goes on for ever
    row = rows[GREEDY, 0, 0]
    assert row["truncated"] and not row["eos"] and row["length"] == 6
    stopped = make_task(stop_strings=("b",))
    row = ask(table(certain(colon="a", a="b", b="c")), stopped, samples=0)[0][GREEDY, 0, 0]
    assert (row["truncated"], row["eos"], row["length"], row["completion"]) == (
        False,
        False,
        2,
        "a",
    )


def test_what_is_done_is_not_repeated():
    rows, _ = ask(done={(GREEDY, n) for n in range(20)} | {(SAMPLED, 1)})
    assert {key[:2] for key in rows} == {(SAMPLED, n) for n in range(20) if n != 1}


def test_batches_by_hand():
    lengths = [30, 100, 40, 20, 33]
    # 2 problems of 4 samples fit into 9 rows; longest first; few batches share one width
    assert batches(lengths, range(5), 4, 9) == [
        Batch((1, 2), 2, 112, 4, 0),
        Batch((4, 0), 2, 112, 4, 0),
        Batch((3,), 2, 112, 4, 0),
    ]
    # eight batches of at most 32 tokens are worth a program of their own, one of 64 is not
    many = batches([100, 40] + [20] * 8, range(10), 2, 3)
    assert [batch.width for batch in many] == [112, 112] + [32] * 8
    # 5 samples in batches of 2 rows: three batches for each problem
    split = batches([8], [0], 5, 2)
    assert split == [Batch((0,), 1, 16, 2, first) for first in (0, 2, 4)]
    # the shapes of what is left are those of the whole
    assert batches(lengths, [3], 1, 2) == [Batch((3,), 2, 32, 1, 0)]


def test_a_row_has_the_id_of_its_problem_and_sample():
    ids = row_ids([3, 1, 1], Batch((3, 1), 3, 16, 2, 4), 5)
    three, one = 3 * MOST_SAMPLES, MOST_SAMPLES
    # the sixth of five samples, and a third problem, only fill the batch
    assert ids.tolist() == [three + 4, three + 4, one + 4, one + 4, one + 4, one + 4]


# ----------------------------------------------------------------------------------------- votes


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>1</answer> or <answer>\n1,234\n</answer>", Fraction(1234)),
        (r"\boxed{1} no, \boxed{\frac{1}{2}} 7", Fraction(1, 2)),
        ("so 17\n#### 18\nQuestion: 5", Fraction(18)),
        ("It is 3, or 0.50 dollars.", Fraction(1, 2)),
        ("1 2 -7,", Fraction(-7)),
        ("first\nyes.\n", "yes"),
        (r"\boxed{\left( 3, \dfrac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
        (r"$\boxed{5 \text{ cm}}$", "5cm"),
        (" \n", None),
    ],
)
def test_what_a_completion_votes_for(completion, answer):
    assert vote(completion, truncated=False) == answer
    assert vote(completion, truncated=True) is None


def test_hostile_text_votes_at_once():
    for text in (r"\boxed{", "1,", "1/", "-", "<answer>", r"\text{", "{", "1." * 3, "\0\n"):
        vote(text * 30_000, truncated=False)
    assert final_answer("9" * 100_000) == "9" * 100_000  # no conversion


# --------------------------------------------------------------------------------------- numbers


def row(problem, sample, text, correct, mode=SAMPLED, **changes):
    fields = {"problem": problem, "sample": sample, "completion": text, "correct": correct}
    fields |= {"mode": mode, "level": 1, "length": len(text), "truncated": False, "eos": True}
    return fields | {"reward": float(correct), "parts": {"correct": float(correct)}} | changes


PROBLEMS = [
    # one right of four, and the majority says 2
    *(row(0, n, text, text == "1") for n, text in enumerate(("1", "2", "2", "3333"))),
    # three right of four; the first two disagree, and the first one wins
    *(row(1, n, text, text == "1") for n, text in enumerate(("1", "2", "1.0", "1"))),
    row(0, 0, "1", 1, GREEDY),
    row(1, 0, "22", 0, GREEDY, truncated=True, eos=False, reward=None, parts={"correct": None}),
]
PROBLEMS[6] |= {"correct": 1, "truncated": True, "eos": False}  # right, but it doesn't vote


def test_measures_by_hand():
    found = measures(PROBLEMS, (1, 2, 4))
    values = {name: measure.values.tolist() for name, measure in found.items()}
    assert values["greedy"] == [1, 0]
    assert values["mean@4"] == values["pass@1"] == [1 / 4, 3 / 4]
    assert values["pass@2"] == [1 / 2, 1]  # 1 - C(3,2)/C(4,2) and 1 - C(1,2)/C(4,2)
    assert values["pass@4"] == [1, 1]
    assert "maj@1" not in values
    assert values["maj@2"] == [1, 1]  # one vote each: the one seen first
    assert values["maj@4"] == [0, 1]
    assert values["length"] == [(1 + 1 + 1 + 4) / 4, (1 + 1 + 3 + 1) / 4]
    assert values["truncated"] == values["no_eos"] == [0, 1 / 4]
    assert values["greedy/truncated"] == values["greedy/no_eos"] == [0, 1]
    assert values["greedy/length"] == [1, 2]
    np.testing.assert_array_equal(found["greedy/reward"].values, [1, np.nan])
    assert values["reward/correct"] == values["reward"]
    assert {name for name, m in found.items() if not m.share} == {
        prefix + name
        for prefix in ("", "greedy/")
        for name in ("length", "reward", "reward/correct")
    }


def test_means_and_intervals_of_problems():
    result = summary(measures(PROBLEMS, (1, 4)))
    # two problems, .25 and .75: their resamples have the means .25, .5, .75
    assert result["mean@4"] == {"value": 0.5, "low": 0.25, "high": 0.75, "problems": 2}
    assert result["pass@4"]["value"] == 1  # two of two: Wilson's interval, not [1, 1]
    assert result["pass@4"]["low"] == pytest.approx(0.342, abs=1e-3)
    assert result["greedy"]["low"] == pytest.approx(0.0945, abs=1e-3)
    # the one answer with a score
    assert result["greedy/reward"] == {"value": 1, "low": None, "high": None, "problems": 1}
    nothing = [replaced | {"reward": None, "parts": {"correct": None}} for replaced in PROBLEMS]
    assert summary(measures(nothing, ()))["reward"]["value"] is None


def test_levels_in_their_order():
    rows = [row(n, 0, "1", 1, level=level) for n, level in enumerate((10, 9, 9))]
    assert [(level, len(some)) for level, some in by_level(rows).items()] == [("9", 2), ("10", 1)]
    assert by_level(rows[1:]) == {}
    assert list(by_level([rows[0], row(1, 0, "1", 1, level=None)])) == ["10", "None"]


def test_the_tables():
    metrics = summary(measures(PROBLEMS, (1, 2, 4)))
    one = {"problems": 2, "metrics": metrics, "levels": {"3": {"problems": 1, "metrics": metrics}}}
    one |= {
        "unscorable": {"correct": 0},
        "failed": {"correct": 2, "form": 0},
        "dropped": {"bad": 1},
    }
    text = benchmark_report.tables({"sets": {"a": one, "b": one | {"levels": {}}}})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["set", "problems", "greedy", "mean@4", "pass@4", "maj@4"] in lines
    _, count, _, mean, *_ = next(cells for cells in lines if cells[:1] == ["a, level 3"])
    assert (count, mean) == ("1", "0.500 [0.250, 0.750]")
    assert ["(mean of the sets)", "", "0.500", "0.500", "1.000", "0.500"] in lines  # no interval
    assert ["set", "problems", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"] in lines
    behaviour = next(cells for cells in lines if cells[:2] == ["a", "1.6 [1.5, 1.8]"])
    assert behaviour[2] == "0.125 [0.000, 0.250]" and behaviour[5:] == ["0", "correct 2", "bad 1"]
