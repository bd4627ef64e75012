"""Names that somebody chose, on their way to a folder, a W&B page or a terminal."""

import hashlib
import re
from collections.abc import Iterable, Iterator

from grpo_jax.screen import visible

LONGEST_FOLDER = 200  # bytes of a job's folder; file systems stop at 255
LONGEST = 128  # characters; of a project W&B takes no more
_NOT_OF_A_PROJECT = "/\\#?%:"  # W&B's own list: they would be part of an address
_PART = re.compile(r"\w[\w.-]*")


def folder_name(overrides: str) -> str:
    """A job's folder in a sweep, from its overrides: one level, short, no two jobs the same, and
    nothing in it that a terminal obeys.

    >>> folder_name("clip=higher,seed=0")
    'clip=higher,seed=0'
    >>> folder_name("seed=0,task.path=data/gsm8k")
    'seed=0,task.path=data_gsm8k-XXXXXXXX'
    """
    name = re.sub(r"[/\n\t]", "_", visible(overrides))
    if name == overrides and len(name.encode()) <= LONGEST_FOLDER and name not in (".", ".."):
        return name
    mark = hashlib.sha256(overrides.encode(errors="backslashreplace")).hexdigest()[:8]
    head = name.encode()[: LONGEST_FOLDER - len(mark) - 1].decode(errors="ignore")
    return f"{head}-{mark}"


def refused_word(word: str) -> str | None:
    """What is wrong with a word of the command line, or None: the log file is called after the job,
    and Hydra opens it before anybody can look."""
    key, _, value = word.partition("=")
    if key.lstrip("+") != "hydra.job.name" or _PART.fullmatch(value):
        return None
    return f"{key}={value!r}: a log file's name is made of letters, digits, _ . and -"


def problems(said: Iterable[tuple[str, str | None]], parts: Iterable[str]) -> Iterator[str]:
    """What can't be a name, a line each.

    Args:
        said: places in the configuration with the name that stands there, or None.
        parts: names of parts of the reward, which become names of metrics.
    """
    for where, name in said:
        if name is None:
            continue
        if re.sub(r"[\n\t]", "\0", name) != visible(name):
            yield f"{where}={name!r}: a name has no control characters"
        if len(name) > LONGEST:
            yield f"{where}={name[:20]!r}...: {len(name)} characters; at most {LONGEST}"
        if where == "logger.project" and set(name) & set(_NOT_OF_A_PROJECT):
            yield f"{where}={name!r}: W&B takes none of {' '.join(_NOT_OF_A_PROJECT)} in a project"
    for name in parts:
        if not _PART.fullmatch(name) or len(name) > LONGEST:
            yield f"reward.{name[:40]!r}: a part's name is made of letters, digits, _ . and -"
