"""Ours and a peer's command, one after the other and again (A B A B), so that both meet the same
machine. Each round is a process of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_jax.timing.shapes import WHAT

# Seconds that a peer's JSON lines give, by what of ours they compare with.
KEYS = "rollout=gen_wall,logprobs=logp_nograd_wall,gradient=train_wall,step=step_wall"


class PeerError(RuntimeError):
    """A command failed or did not print what it should; the text says which."""


@dataclass(frozen=True)
class Ratio:
    """Seconds of each round. `ratio`: the peer's least by our least; above 1, ours is faster."""

    what: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return min(self.peer) / min(self.ours)


def parse_keys(text: str) -> dict[str, tuple[str, ...]]:
    """`rollout=a,gradient=b+c` -> {"rollout": ("a",), "gradient": ("b", "c")}. ValueError, naming
    what is wrong."""
    keys = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)=([\w.]+(?:\+[\w.]+)*)", part.strip())
        if found is None or found[1] not in WHAT:
            raise ValueError(f"{part!r} is not PART=KEY or PART=KEY+KEY with PART of {WHAT}")
        if found[1] in keys:
            raise ValueError(f"{found[1]} has two keys")
        keys[found[1]] = tuple(found[2].split("+"))
    return keys


def run(command: str | Sequence[str], name: str) -> list[dict]:
    """The JSON objects on a command's stdout; other lines are its own affair, and its stderr goes
    to ours. A text is a shell's, a sequence is run as it stands. Raises PeerError."""
    done = subprocess.run(
        command, shell=isinstance(command, str), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise PeerError(f"{name} ended with exit status {done.returncode}: {command}")
    found = [_object(line) for line in done.stdout.splitlines()]
    return [line for line in found if line is not None]


def _object(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def peer_seconds(lines: Sequence[dict], keys: Sequence[str]) -> float | None:
    """The least sum of those keys over the lines that have them all; None where none has."""
    sums = []
    for line in lines:
        numbers = [line[key] for key in keys if isinstance(line.get(key), int | float)]
        if len(numbers) == len(keys):
            sums.append(sum(numbers))
    return min(sums, default=None)


def alternate(
    ours: Sequence[str],
    peer: str,
    keys: dict[str, tuple[str, ...]],
    rounds: int,
) -> tuple[list[Ratio], list[dict]]:
    """`rounds` times `ours` and then `peer` -> (a ratio for each part that both report, all lines
    of ours, which have "what" and "seconds_min"). Raises PeerError where a command fails, or the
    two have no part in common."""
    found: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what in keys}
    lines = []
    for number in range(1, rounds + 1):
        print(f"round {number} of {rounds}: ours", file=sys.stderr)
        own = run(ours, "our own command")
        print(f"round {number} of {rounds}: the peer", file=sys.stderr)
        theirs = run(peer, "the peer's command")
        lines += own
        for what, names in keys.items():
            here = [line["seconds_min"] for line in own if line.get("what") == what]
            there = peer_seconds(theirs, names)
            if here and there is not None:
                found[what][0].append(min(here))
                found[what][1].append(there)
    ratios = [Ratio(what, tuple(a), tuple(b)) for what, (a, b) in found.items() if a]
    if not ratios:
        raise PeerError(f"the peer printed none of the keys of {', '.join(keys)} as JSON lines")
    return ratios, lines
