"""What must not be written down: the environment's credentials, and logins in URLs.

A run folder keeps its configuration, and W&B the command line: so what holds a credential is
refused before anything is written (`problems`, `refused_word`). What an error or a log says on its
way to a file or the screen is blanked out (`hidden`).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_NAME = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|JWT|_PAT)$", re.IGNORECASE
)
_LOGIN = re.compile(r"(\w+://)[^/\s@?#]+@")
# keys of a configuration: fewer than names of variables, as `pad_token` and `sort_key` are none
_ENTRY = re.compile(
    r"(^|[._])(api_?key|access_?key|private_?key|(access|auth|hf|api)_?token|secret|passw(or)?d)$",
    re.IGNORECASE,
)
_SET = "hydra.job.env_set."
_SHORTEST = 8  # characters: blanking shorter ones would hide ordinary words and protect nothing
INSTEAD = "a run folder keeps what it was told: let the code that needs it read the environment"


def is_secret(name: str) -> bool:
    """Whether an environment variable of that name holds a credential."""
    return _NAME.search(name) is not None


def hidden(text: str) -> str:
    """`text` without logins in URLs and without the values of secret environment variables."""
    text = _LOGIN.sub(r"\1[hidden]@", text)
    for value in sorted(_values(), key=len, reverse=True):  # one may contain another
        text = text.replace(value, "[hidden]")
    return text


def blank(error: BaseException) -> None:
    """`hidden` for what an exception and those behind it say: whoever prints it knows no better."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        words = (hidden(a) if isinstance(a, str) else a for a in following.args)
        with suppress(AttributeError, TypeError):  # a class of its own making
            following.args = tuple(words)
        following = following.__cause__ or following.__context__


def problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What a resolved configuration holds and must not, a line each, without the secret itself."""
    for key, text in _texts(config, ""):
        found = _found(text)
        if found is None and text and _ENTRY.search(key):
            found = "a credential, by its name"
        if found is not None:
            yield f"{key} holds {found}: {INSTEAD}"


def refused_word(word: str) -> str | None:
    """What is wrong with a word of the command line, or None: Hydra writes it down before anybody
    can look at the configuration."""
    key, _, value = word.partition("=")
    key, found = key.lstrip("+~"), _found(word)
    by_name = is_secret(key) if key.startswith(_SET) else _ENTRY.search(key)
    if found is None and by_name and value not in ("", "null") and not value.startswith("${"):
        found = "a credential, by its name"
    return None if found is None else f"{key} holds {found}: {INSTEAD}"


def _values() -> dict[str, str]:
    """The secrets there are, each with the name of its variable."""
    named = ((value, name) for name, value in os.environ.items() if is_secret(name))
    return {value: name for value, name in named if len(value) >= _SHORTEST}


def _found(text: str) -> str | None:
    if _LOGIN.search(text):
        return "a URL with a login"
    names = (name for value, name in _values().items() if value in text)
    return next((f"the value of the environment's {name}" for name in names), None)


def _texts(tree: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value, where)
    elif isinstance(tree, str):
        yield where, tree
