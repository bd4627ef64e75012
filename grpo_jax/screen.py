"""What a run says on the screen: above the bar, behind its name where several share it.

Part of it was written by a model, a data set or somebody's folder, so that what a terminal would
obey is shown as text.
"""

import sys
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

from grpo_jax.confidential import hidden

# a thread begins without: what one run says never carries another's name
_name: ContextVar[str | None] = ContextVar("name", default=None)
_other: str | None = None  # the name of a process that another one speaks for

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories: control, format, surrogate, separators


def say(text: str, *, error: bool = False) -> None:
    """Print a line, or several, each behind the name of this thread's run if it has one. Without
    credentials, with what a terminal would obey as text, and what it can't encode too."""
    if _other is not None and not error:
        return
    text, name = visible(hidden(text)), _other or _name.get()
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    lines = text if name is None else "\n".join(f"{name}: {line}" for line in text.split("\n"))
    tqdm.write(lines, file=stream)


def visible(text: str) -> str:
    r"""`text` that does nothing but print: control characters, escape sequences, marks that turn
    the direction of writing and lone surrogates as `\x1b` and the like. Line ends and tabs stay.
    """
    return "".join(_escape(c) if unicodedata.category(c) in _OBEYED else c for c in text)


def only_errors(name: str) -> None:
    """From now on this process says nothing but errors, under that name: one of several processes
    of a run, of which the first one speaks."""
    global _other
    _other = name


@contextmanager
def named(name: str) -> Generator[None]:
    """What this thread says within, it says under that name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def _escape(character: str) -> str:
    return character if character in "\n\t" else repr(character)[1:-1]
