"""How the values of an axis are called: everyone gets the axis's arguments, and what it asks for.

A rule is a function of its axis's arguments (`kernels/<axis>.py` says which). Some rules need more:
VESPO wants the correction's weights, ReMax the reward of a greedy answer. Such a rule names it as a
keyword-only parameter, and gets it; the signatures of all others stay as they are. A constant bound
by `functools.partial` under the same name wins.

A rule that compares rows with each other (a quantile, a covariance over the batch) says so with
`@across_rows`. It is then shown the whole minibatch of an optimizer step at once, however that is
cut into micro-batches; a rule that isn't marked may be shown any part of it.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Rule = TypeVar("Rule", bound=Callable[..., Any])


def call(rule: Callable[..., Any], *arguments: Any, **offered: Any) -> Any:
    """`rule(*arguments)`, with those of `offered` that it asks for by name."""
    return rule(*arguments, **{n: value for n, value in offered.items() if asks(rule, n)})


def asks(rule: Callable[..., Any], name: str) -> bool:
    """Whether `rule` has a keyword-only parameter `name` that is not bound yet."""
    bound = rule.keywords if isinstance(rule, partial) else {}
    parameter = inspect.signature(rule).parameters.get(name)
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY and name not in bound


def across_rows(rule: Rule) -> Rule:
    """Mark a rule that has to see the whole minibatch."""
    setattr(rule, "across_rows", True)  # noqa: B010 (a function has no such attribute to type)
    return rule


def sees_all_rows(rule: Callable[..., Any]) -> bool:
    """Whether a rule, or one bound into it as a constant, is marked with `across_rows`."""
    if not isinstance(rule, partial):
        return getattr(rule, "across_rows", False)
    inner = [value for value in rule.keywords.values() if callable(value)]
    return any(sees_all_rows(each) for each in (rule.func, *inner))


def proportional(clip: Callable[..., Any]) -> bool:
    """Whether a clip is one of this project's, whose objectives are all 0 where the advantage is
    (tests/test_silent.py looks at each). Of a user's function nothing is known."""
    rule = clip.func if isinstance(clip, partial) else clip
    return getattr(rule, "__module__", "").startswith("grpo_jax.kernels.")
