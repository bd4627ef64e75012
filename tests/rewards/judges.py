"""The LaTeX reward as the tests use it: one pool of workers for all of a test process."""

from functools import cache

from grpo_jax.rewards.latex import Latex

# Generous: the machine may be busy with other tests
JUDGE = Latex(workers=1, seconds=20.0, batch_seconds=120.0)
HASTY = Latex(workers=1, seconds=1.0, batch_seconds=60.0)


@cache
def judged(pairs: tuple[tuple[str, str], ...], **changes: str) -> dict[tuple[str, str], object]:
    """Scores of (gold, what stands in the box)."""
    judge = Latex(**{**vars(JUDGE), **changes})
    boxes = [f"So it is \\boxed{{{answer}}}." for _, answer in pairs]
    return dict(zip(pairs, judge.batch(boxes, [gold for gold, _ in pairs]), strict=True))
