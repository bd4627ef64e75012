"""A chat template is a program that came with a model: it is tried out before it is used.

transformers renders templates in Jinja's sandbox, where they reach no file, no module and no
attribute that Python keeps to itself. A sandbox bounds neither time nor memory, though: loops in
loops, `'a' * 10**10`. So each template is first rendered in a process of its own, with limits; this
file is that process's program.
"""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

SECONDS = 2  # of computing; a real one needs milliseconds
CLOCK = 120  # seconds, after which it is stopped whatever it does: a busy machine is slow
MEMORY = 2**30  # bytes of address space
LONGEST = 2**20  # characters of a rendered conversation of two lines
TOO_MUCH, FORBIDDEN = 3, 4  # exit codes
_MESSAGES = (
    [{"role": "user", "content": "What is 1 + 1?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
)
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own: they print nothing


def refuse_harmful(template: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a short conversation takes the template more than its limits, or leads it
    to what the sandbox forbids. Any other error is left for its use to show: a template may refuse
    a role. (One that waits for some text of a prompt is still a hang, and no more than that.)"""
    _try(template, json.dumps(dict(arguments), default=str))


@lru_cache(maxsize=64)
def _try(template: str, arguments: str) -> None:
    given = json.dumps([template, json.loads(arguments)])
    command = [sys.executable, "-I", __file__]  # isolated: it imports nothing from this folder
    try:
        done = subprocess.run(
            command, input=given.encode(), capture_output=True, timeout=CLOCK, check=False
        )
        code, said = done.returncode, (done.stdout or done.stderr).decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        code, said = TOO_MUCH, ""
    if code == FORBIDDEN:
        raise ValueError(f"the chat template does what its sandbox forbids: {said[:200]}")
    if code == TOO_MUCH or code < 0:  # killed, at a limit
        raise ValueError(
            f"the chat template takes more than {SECONDS} s, {MEMORY >> 20} MiB or {LONGEST:,} "
            "characters for two lines"
        )
    if code:
        raise ValueError(f"the chat template could not be tried out: {said[-200:]}")


def _render(template: str, arguments: dict[str, Any]) -> int:
    """The exit code. As transformers renders it, but for its error messages."""
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(text: str) -> None:
        raise TemplateError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": lambda form: form}
    environment.globals.update(functions)
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<s>")
    for messages in _MESSAGES:
        try:
            text = environment.from_string(_MARKS.sub("", template)).render(
                **(named | arguments), messages=messages, add_generation_prompt=True
            )
        except SecurityError as error:
            print(error)
            return FORBIDDEN
        except MemoryError:
            return TOO_MUCH
        except Exception:
            continue
        if len(text) > LONGEST:
            return TOO_MUCH
    return 0


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    _cap(resource.RLIMIT_AS, MEMORY)
    _cap(resource.RLIMIT_CPU, SECONDS)
    _cap(resource.RLIMIT_CORE, 0)
    sys.exit(_render(*json.loads(sys.stdin.buffer.read())))
