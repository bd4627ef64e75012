import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from grpo_jax.rewards import article, numeric
from grpo_jax.rewards.combine import RewardPart, RewardTable, score
from grpo_jax.rewards.workers import Failure

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


class Batch:
    """Gives back `values`, and remembers what it was asked."""

    def __init__(self, values=None):
        self.values = values

    def __call__(self, completion, answer, **columns):
        raise NotImplementedError

    def batch(self, completions, answers, *, level=None, **columns):
        self.asked = completions, answers, level, columns
        return self.values


def test_a_batch_is_called_once_with_columns_as_lists():
    many = Batch([1, None, 0.5, np.float32(2)])
    table = score([RewardPart("many", many)], ROWS, GOLDS, {"level": (3, 1, 2, 0), "x": [1] * 4})
    assert many.asked == (ROWS, GOLDS, [3, 1, 2, 0], {"x": [1] * 4})
    np.testing.assert_array_equal(table.total, np.float32([1, np.nan, 0.5, 2]))
    assert table.unscorable == {"many": 1} and table.failed == {"many": 0}
    assert score([RewardPart("many", Batch())], [], []).total.shape == (0,)


def test_a_failure_scores_its_value_and_is_no_other_kind_of_row():
    rows = [Failure("it hung", 0.0, "timeout"), 0.0, Failure("it died"), None]
    table = score([RewardPart("many", Batch(rows))], ROWS, GOLDS)
    np.testing.assert_array_equal(table.total, np.float32([0, 0, np.nan, np.nan]))
    assert table.failed == {"many": 2} and table.unscorable == {"many": 1}
    assert table.lost["many"].tolist() == [True, False, True, False]
    assert table.errors == {"many": "it hung (row 0: completion 'a', answer '1')"}


def test_a_batch_that_raises_has_failed_on_all_its_rows():
    class Raises(Batch):
        def batch(self, completions, answers):
            raise KeyError("no")

    table = score([RewardPart("many", Raises()), RewardPart("size", size)], ROWS, GOLDS)
    assert table.failed == {"many": 4, "size": 0} and np.isnan(table.total).all()
    assert table.errors["many"].startswith("KeyError: 'no' (row 0: completion 'a'")


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ([1.0] * 3, ValueError, r"'many' \(.*Batch\.batch\) returned 3 values for 4 completions"),
        (np.ones(5), ValueError, "returned 5 values for 4"),
        (1.0, TypeError, "must return a list, one value a row; got float"),
        (None, TypeError, "got NoneType"),
        ("1234", TypeError, "got str"),
        ([1.0, "x", 1.0, 1.0], TypeError, r"got str from .*Batch \(row 1: completion 'bb', answer"),
        ([1.0, [1], 1.0, 1.0], TypeError, "got list"),
        ([Failure("it hung", "0")] * 4, TypeError, "got str"),
    ],
)
def test_a_batch_gives_back_a_list_of_scores(values, error, text):
    with pytest.raises(error, match=text):
        score([RewardPart("many", Batch(values))], ROWS, GOLDS)


def test_a_missing_column_of_a_batch_is_named_before_it_is_called():
    class Needy(Batch):
        def batch(self, completions, answers, nothing):
            raise AssertionError

    with pytest.raises(TypeError, match=r"'needy' \(.*Needy\) cannot be called.*nothing"):
        score([RewardPart("needy", Needy())], ROWS, GOLDS, {"level": [0] * 4})


def test_tables_are_cut_and_joined_with_their_counts():
    first = score([RewardPart("f", raises_on_ccc), RewardPart("s", refuses_long)], ROWS, GOLDS)
    cut = first.take(np.array([2, 0]))
    assert cut.failed == {"f": 1, "s": 0} and cut.unscorable == {"f": 0, "s": 1}
    assert first.take(np.array([0, 1])).failed == {"f": 0, "s": 0}
    both = RewardTable.concatenate([first.take(np.array([0])), cut, first])
    assert both.failed == {"f": 2, "s": 0} and both.unscorable == {"f": 0, "s": 3}
    np.testing.assert_array_equal(both.lost["f"], [0, 1, 0, 0, 0, 1, 0])
    assert both.errors == first.errors and both.total.shape == both.parts["s"].shape == (7,)


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
    text = r"'listy' must return a number or None .*from tests\..*lambda> \(row 0: completion 'c'"
    with pytest.raises(TypeError, match=text):
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
