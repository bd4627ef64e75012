import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from grpo_jax.rewards import article, numeric
from grpo_jax.rewards.combine import RewardPart, score

ROWS = ["a", "bb", "ccc", "dddd"]
GOLDS = ["1", "2", "3", "4"]


def size(completion, answer):
    return float(len(completion))


def refuses_long(completion, answer):
    return None if len(completion) > 2 else 1.0


def raises_on_ccc(completion, answer):
    if completion == "ccc":
        raise RuntimeError("boom")
    return 1.0


def test_weighted_sum_and_named_parts():
    parts = [RewardPart("size", size, 0.5), RewardPart("one", lambda c, a: 1.0, -2.0)]
    table = score(parts, ROWS, GOLDS)
    np.testing.assert_array_equal(table.total, np.float32([-1.5, -1.0, -0.5, 0.0]))
    np.testing.assert_array_equal(table.parts["size"], np.float32([1, 2, 3, 4]))  # unweighted
    np.testing.assert_array_equal(table.parts["one"], np.float32([1, 1, 1, 1]))
    assert table.total.dtype == table.parts["size"].dtype == np.float32
    assert table.unscorable == table.failed == {"size": 0, "one": 0}
    assert table.errors == {}


def test_the_article_list_sums_to_four_for_a_perfect_completion():
    names = ("xmlcount", "soft_format", "strict_format", "integer", "correctness")
    parts = [RewardPart(name, getattr(article, name)) for name in names]
    clean = "<reasoning>\nwork\n</reasoning>\n<answer>\n8\n</answer>\n"
    assert score(parts, [clean, "8", ""], ["8", "8", "8"]).total.tolist() == [4.0, 2.5, 0.0]


def test_unscorable_rows_are_nan_counted_and_never_zero():
    parts = [RewardPart("size", size), RewardPart("short", refuses_long)]
    table = score(parts, ROWS, GOLDS)
    np.testing.assert_array_equal(table.parts["short"], np.float32([1, 1, np.nan, np.nan]))
    np.testing.assert_array_equal(table.total, np.float32([2, 3, np.nan, np.nan]))
    assert table.unscorable == {"size": 0, "short": 2}
    assert table.failed == {"size": 0, "short": 0}


def test_nan_is_unscorable_as_none_is():
    table = score([RewardPart("nan", lambda c, a: math.nan)], ROWS, GOLDS)
    assert table.unscorable == {"nan": 4}
    assert np.isnan(table.total).all()


def test_unreadable_gold_becomes_an_unscorable_row():
    table = score([RewardPart("correct", numeric.correct)], ["<answer>8</answer>"] * 2, ["8", "?"])
    np.testing.assert_array_equal(table.total, np.float32([1, np.nan]))
    assert table.unscorable == {"correct": 1}


def test_a_part_of_weight_zero_only_watches():
    parts = [RewardPart("size", size), RewardPart("short", refuses_long, 0.0)]
    table = score(parts, ROWS, GOLDS)
    assert table.total.tolist() == [1, 2, 3, 4]
    assert table.unscorable["short"] == 2


def test_a_raising_reward_costs_its_row_only_and_is_named():
    table = score([RewardPart("fragile", raises_on_ccc), RewardPart("size", size)], ROWS, GOLDS)
    np.testing.assert_array_equal(table.total, np.float32([2, 3, np.nan, 5]))
    assert table.failed == {"fragile": 1, "size": 0}
    assert table.unscorable == {"fragile": 0, "size": 0}  # disjoint counters
    assert list(table.errors) == ["fragile"]
    for part in ("RuntimeError: boom", "row 2", "'ccc'", "'3'"):
        assert part in table.errors["fragile"]


def test_the_first_error_is_kept_and_short():
    def loud(completion, answer):
        raise ValueError(completion)

    table = score([RewardPart("loud", loud)], ["x" * 10_000, "y"], ["", ""])
    assert table.failed == {"loud": 2}
    assert "row 0" in table.errors["loud"]
    assert len(table.errors["loud"]) < 1000


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e39, 10**400, Fraction(10**400)])
def test_a_score_that_float32_cannot_hold_is_a_failure(value):
    table = score([RewardPart("huge", lambda c, a: value)], ["c"], ["a"])
    assert np.isnan(table.total).all()
    assert table.failed == {"huge": 1}
    assert table.unscorable == {"huge": 0}


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.True_, Fraction(1)])
def test_numbers_of_every_kind_are_scores(value):
    assert score([RewardPart("one", lambda c, a: value)], ["c"], ["a"]).total.tolist() == [1.0]


@pytest.mark.parametrize("value", [[1.0], [1.0, 1.0], "1", (1.0,), 1j, {}, np.ones(2)])
def test_anything_else_is_a_type_error_that_names_the_part(value):
    with pytest.raises(TypeError, match="'listy' must return a number or None"):
        score([RewardPart("listy", lambda c, a: value)], ["c"], ["a"])


def test_functions_get_the_columns_they_name():
    def by_level(completion, answer, level):
        return float(level)

    def cut(completion, answer, *, truncated=False):
        return -1.0 if truncated else 0.0

    def everything(completion, answer, **columns):
        return float(len(columns))

    parts = [RewardPart(f.__name__, f) for f in (by_level, cut, everything, size)]
    columns = {"level": [3, 1, 2, 0], "truncated": [False, True, False, False]}
    table = score(parts, ROWS, GOLDS, columns)
    assert table.parts["by_level"].tolist() == [3, 1, 2, 0]
    assert table.parts["cut"].tolist() == [0, -1, 0, 0]
    assert table.parts["everything"].tolist() == [2, 2, 2, 2]
    assert score([parts[1]], ROWS, GOLDS).total.tolist() == [0, 0, 0, 0]  # its default


def test_a_bound_constant_wins_over_a_column():
    def scaled(completion, answer, level, bonus=0):
        return float(level + bonus)

    part = RewardPart("scaled", partial(scaled, level=10))
    table = score([part], ["c"], ["a"], {"level": [1], "bonus": [5]})
    assert table.total.tolist() == [15.0]


def test_the_first_two_parameters_may_have_any_name():
    def renamed(text, gold, answer_type):
        return float(text == gold == answer_type)

    columns = {"answer_type": ["x"], "text": ["y"]}
    assert score([RewardPart("renamed", renamed)], ["x"], ["x"], columns).total.tolist() == [1.0]


def test_a_missing_column_is_named_before_anything_is_scored():
    def needy(completion, answer, level):
        return 1.0

    with pytest.raises(TypeError, match=r"'needy'.*level"):
        score([RewardPart("needy", needy)], ROWS, GOLDS, {"other": [0] * 4})


@pytest.mark.parametrize(
    ("parts", "answers", "columns", "message"),
    [
        ([], GOLDS, {}, "at least one"),
        ([RewardPart("a", size), RewardPart("a", size)], GOLDS, {}, "different names"),
        ([RewardPart("a", size)], GOLDS[:3], {}, "4 completions but 3 'answers'"),
        ([RewardPart("a", size)], GOLDS, {"level": [1]}, "4 completions but 1 'level'"),
        ([RewardPart("a", size)], GOLDS, {"answer": GOLDS}, "may not be called"),
    ],
)
def test_wrong_inputs_are_refused(parts, answers, columns, message):
    with pytest.raises(ValueError, match=message):
        score(parts, ROWS, answers, columns)


def test_a_weight_must_be_finite():
    with pytest.raises(ValueError, match=r"'size'.*not finite"):
        RewardPart("size", size, math.nan)


def test_an_empty_batch_has_an_empty_table():
    table = score([RewardPart("size", size)], [], [])
    assert table.total.shape == (0,)
