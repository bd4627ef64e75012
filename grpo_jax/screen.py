"""What a run says on the screen: above the bar, behind its name where several share it."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

# a thread begins without: what one run says never carries another's name
_name: ContextVar[str | None] = ContextVar("name", default=None)


def say(text: str) -> None:
    """Print a line, or several, each behind the name of this thread's run if it has one."""
    name = _name.get()
    tqdm.write(text if name is None else "\n".join(f"{name}: {line}" for line in text.split("\n")))


@contextmanager
def named(name: str) -> Generator[None]:
    """What this thread says within, it says under that name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)
