"""Statistics for comparing runs over seeds, and for benchmarks over problems: small n,
deterministic, no global random state.

A value here is one number a seed (or a row of K numbers a seed). Resampling draws from a
`numpy.random.Generator` of its own, made from the `seed` argument, so the same input gives the same
output, bit for bit.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


@dataclass(frozen=True)
class PairedDifference:
    """The mean of x - y over common seeds, its interval, and a two-sided p value."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def iqm(values: ArrayLike, axis: int | None = None) -> np.ndarray:
    """Interquartile mean: the mean of what is left without the lowest and highest quarter.

    floor(n/4) values go at either end, as in Agarwal et al. 2021 (arXiv:2108.13264), so for
    n < 4 this is the plain mean. Raises ValueError for no values and for values that are not finite
    (a NaN sorts to the top, where trimming would hide it).
    """
    x = _finite("values", values)
    if x.size == 0:
        raise ValueError("iqm of no values")
    return np.asarray(stats.trim_mean(x, 0.25, axis=axis))


def bootstrap_interval(
    values: ArrayLike,
    statistic: Callable[..., np.ndarray] = iqm,
    *,
    level: float = 0.95,
    method: str = "percentile",
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Bootstrap interval of `statistic` over seeds: values [n] or [n, K] -> (low, high), [] or [K].

    Whole seeds are resampled: the K columns share their resamples. `method` is "percentile" or
    "bca" (Efron 1987); where BCa is undefined (tied values, very few seeds) that column falls back
    to the percentile interval. None for fewer than two seeds. With few seeds every bootstrap
    interval is too narrow: the 95 % percentile interval of the IQM of n normal numbers held the
    truth in 75 % of 4,000 simulated samples for n = 3, 88 % for n = 4, 94 % for n = 8. ValueError
    for values that are not finite or an unknown method.
    """
    if method not in ("percentile", "bca"):
        raise ValueError(f"method is 'percentile' or 'bca', got {method!r}")
    x = _finite("values", values)
    if x.shape[0] < 2:
        return None

    def interval(kind: str) -> tuple[np.ndarray, np.ndarray]:
        result = stats.bootstrap(
            (x,),
            statistic,
            axis=0,
            vectorized=True,
            confidence_level=level,
            method=kind,
            n_resamples=resamples,
            batch=100,  # bounds the memory: batch * K * n numbers at a time
            rng=np.random.default_rng(seed),
        ).confidence_interval
        return np.asarray(result.low), np.asarray(result.high)

    low, high = interval("percentile")
    if method == "bca":
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy's DegenerateDataWarning: handled below
            bca_low, bca_high = interval("BCa")
        defined = np.isfinite(bca_low) & np.isfinite(bca_high)
        low, high = np.where(defined, bca_low, low), np.where(defined, bca_high, high)
    return low, high


def permutation_test(
    x: ArrayLike, y: ArrayLike, *, resamples: int = 10_000, seed: int = 0
) -> float:
    """Two-sided p value of the sign-flip test of mean(x - y) = 0 for pairs x, y [n].

    Exact when 2**n <= resamples, else from random flips with the (count + 1) / (resamples + 1)
    correction. The smallest value n pairs can give is 2 / 2**n: 0.125 for four, 0.0625 for five.
    ValueError for no pairs, unequal shapes, or values that are not finite.
    """
    x, y = _pairs(x, y)
    if x.size == 0:
        raise ValueError("permutation_test of no pairs")
    if x.size == 1:
        return 1.0  # both signs of one difference are as extreme
    result = stats.permutation_test(
        (x, y),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def paired_difference(
    x: ArrayLike, y: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedDifference | None:
    """Mean of x - y over pairs [n] with Student's t interval and the sign-flip p value.

    The t interval, not a bootstrap, because it keeps its level with three or four seeds. Equal
    differences give an interval of width 0. None for fewer than two pairs. ValueError as in
    `permutation_test`.
    """
    x, y = _pairs(x, y)
    if x.size < 2:
        return None
    difference = x - y
    mean = float(np.mean(difference))
    error = float(np.std(difference, ddof=1)) / np.sqrt(x.size)
    half = float(stats.t.ppf(0.5 + level / 2, x.size - 1)) * error
    p = permutation_test(x, y, resamples=resamples, seed=seed)
    return PairedDifference(mean, mean - half, mean + half, p, x.size)


def probability_of_improvement(x: ArrayLike, y: ArrayLike) -> float:
    """P(X > Y) + P(X = Y) / 2 over all pairs of a value of x [n] and one of y [m].

    Agarwal et al. 2021 (arXiv:2108.13264), section 4.3: the Mann-Whitney U / (n m). ValueError for
    an empty side or values that are not finite.
    """
    x, y = _finite("x", x), _finite("y", y)
    if x.size == 0 or y.size == 0:
        raise ValueError("probability_of_improvement needs a value on both sides")
    sign = np.sign(x[:, None] - y[None, :])
    return float(np.mean((sign + 1) / 2))


def pass_at_k(samples: ArrayLike, correct: ArrayLike, k: int) -> np.ndarray:
    """Unbiased pass@k of each prompt: 1 - C(n - c, k) / C(n, k), shapes broadcast.

    Chen et al. 2021 (arXiv:2107.03374), equation 1: n = samples drawn, c = correct among them.
    Computed as a product of k ratios, so large n does not overflow. ValueError unless
    0 <= c <= n and 1 <= k <= n for every prompt.
    """
    n, c = np.broadcast_arrays(np.asarray(samples, np.int64), np.asarray(correct, np.int64))
    if np.any(c < 0) or np.any(c > n):
        raise ValueError("pass_at_k needs 0 <= correct <= samples")
    if k < 1 or np.any(k > n):
        raise ValueError(f"pass_at_k needs 1 <= k <= samples, got k={k}")
    i = np.arange(k)
    # where n - c < k one factor is 0: then every draw of k holds a correct answer
    none_right = np.prod((n[..., None] - c[..., None] - i) / (n[..., None] - i), axis=-1)
    return 1.0 - none_right


def majority_vote(votes: Sequence[Hashable | None], correct: ArrayLike) -> float:
    """maj@k of one problem, k = len(votes): the score of the answer that most samples gave.

    Self-consistency (Wang et al. 2023, arXiv:2203.11171). Equal votes are one answer, None
    abstains, and of answers with as many votes the one seen first wins. The winner's score is the
    mean of `correct` [k] over the samples that gave it: 0 or 1, unless the reward looks at more
    than the answer. 0.0 where nobody votes. This is the vote of these k samples, no mean over
    subsets of more. ValueError for no samples, unequal lengths or values that are not finite.
    """
    scores = _finite("correct", correct)
    if scores.shape != (len(votes),) or not len(votes):
        raise ValueError(f"majority_vote: {len(votes)} votes, and scores of shape {scores.shape}")
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    (winner, _), *_ = counts.most_common(1)  # of equal counts, the one that was counted first
    return float(np.mean([s for v, s in zip(votes, scores, strict=True) if v == winner]))


def wilson_interval(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share: successes of n independent trials -> (low, high).

    Unlike a bootstrap, it has a width where all trials end alike: 0 of 10 gives [0, 0.278].
    ValueError unless 0 <= successes <= n and n >= 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson_interval needs 0 <= successes <= n, got {successes} of {n}")
    interval = stats.binomtest(successes, n).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


def mean_intervals(
    values: ArrayLike,
    shares: Sequence[bool],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[tuple[float, float] | None]:
    """Intervals of the means over problems: values [n, K], one number a problem and metric.

    Whole problems are resampled (a percentile bootstrap), so that what several samples of one
    problem share counts once, and all K metrics share their resamples. A metric that is a share
    (`shares` [K]) and only 0 or 1 for each problem has Wilson's interval instead. None for a single
    problem otherwise. ValueError for values that are not finite.
    """
    x = _finite("values", values)
    bootstrap = bootstrap_interval(x, np.mean, level=level, resamples=resamples, seed=seed)
    found: list[tuple[float, float] | None] = []
    for k, share in enumerate(shares):
        if share and np.all((x[:, k] == 0) | (x[:, k] == 1)):
            found.append(wilson_interval(int(x[:, k].sum()), len(x), level=level))
        else:
            ends = None if bootstrap is None else (float(bootstrap[0][k]), float(bootstrap[1][k]))
            found.append(ends)
    return found


def _finite(name: str, values: ArrayLike) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if not np.all(np.isfinite(x)):
        raise ValueError(f"{name} holds a value that is not finite")
    return x


def _pairs(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = _finite("x", x), _finite("y", y)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"pairs need two equal lengths, got shapes {x.shape} and {y.shape}")
    return x, y
