"""Several seeds of one configuration in one process, their device programs run as one.

Each run is a thread of `trainer.train` as it stands: its data, rewards, files and metrics are its
own. Where the loop would call a program of its own it hands in a call, and waits. Once all runs
wait, the calls of one program are stacked along a new first axis and computed by one program, and
each thread goes on with its part. Sums may be ordered otherwise than in a run alone: equal to float
tolerance.

On an accelerator that program is the `vmap` of a run's, and k runs cost the launches of one. On a
CPU a program of the tiny model takes as long as its arithmetic does, and a vmapped one, whose
numbers no longer fit in the cache, takes longer than k of them. So the runs are teams there, one a
core, and a team's program takes its runs one after the other.

The default task, 8 seeds, 10 steps and two evaluations, warm starts and compiled programs cached,
on two busy cores: wall (CPU) seconds of two rounds, and of steps 3 to 10 alone.

    one run after the other    68 (70)  62 (58)     35 (37)  32 (31)
    two teams, in turn         49 (50)  45 (47)     31 (32)  28 (30)
    one team, in turn                               32 (31)
    two teams, vmapped                              35 (38)
    one team, vmapped                   66 (63)     48 (49)  43 (42)
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.assemble import Run
from grpo_jax.logging import write_failed
from grpo_jax.preemption import Preempted, heard
from grpo_jax.screen import named, say
from grpo_jax.trainer import finished, train
from grpo_jax.types import TrainingError


class Layout(NamedTuple):
    """How runs share programs; the results are the same to float tolerance."""

    teams: int  # that the runs are dealt out to, each with a program of its own at work
    vmapped: bool  # else a program takes its runs one after the other


def train_together(
    runs: Sequence[Run], layout: Layout | None = None
) -> dict[Path, dict[str, float]]:
    """`train` of runs that differ in seed and folder only -> their final metrics, by folder.

    A run that fails, fails alone: it says so in its folder, and the others go on. Raises
    TrainingError, naming the folders, once they are through. Ctrl-C ends all of them. SIGTERM ends
    each after its step, and Preempted is raised.

    `layout`: None for what suits this machine.
    """
    layout = layout or _layout(len(runs))
    size, programs = -(-len(runs) // layout.teams), Programs(layout.vmapped)
    pairs = []
    for start in range(0, len(runs), size):
        members = runs[start : start + size]
        team = Team(size, len(members), programs)
        pairs += [(run, team) for run in members]
    results, errors = {}, {}
    stopped: list[str] = []

    def one(run: Run, team: Team) -> None:
        try:
            with named(f"seed={run.seed}"):
                results[run.folder] = train(run, jit=team.jit)
        except Preempted as preempted:
            stopped.append(str(preempted))
        except BaseException as error:
            errors[run.folder] = error
            write_failed(run.folder, error)
            say(f"seed={run.seed} failed: {_first_line(error)}")
        finally:
            team.leave()

    teams = list(dict.fromkeys(team for _, team in pairs))
    calls = [(team.serve, ()) for team in teams] + [(one, pair) for pair in _one_bar(pairs)]
    threads = [threading.Thread(target=f, args=given, daemon=True) for f, given in calls]
    try:
        with heard():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except BaseException as error:  # Ctrl-C: every run ends with it, and closes what it has open
        for team in teams:
            team.stop(error)
        for thread in threads:
            thread.join()
        raise
    if stopped:
        raise Preempted("\n".join(sorted(stopped)))
    failed = [run.folder for run in runs if run.folder in errors]
    if failed:
        lines = "".join(f"\n  {folder}: {_first_line(errors[folder])}" for folder in failed)
        raise TrainingError(
            f"{len(failed)} of {len(runs)} seeds failed (FAILED.json has the whole text):{lines}"
        ) from errors[failed[0]]
    return results


def _layout(runs: int) -> Layout:
    if jax.default_backend() != "cpu":
        return Layout(1, True)
    return Layout(min(runs, os.cpu_count() or 1), False)


def _one_bar(pairs: list[tuple[Run, "Team"]]) -> list[tuple[Run, "Team"]]:
    """Only the first run that has anything to do shows its progress: the others are as far."""
    shown = next((run for run, _ in pairs if finished(run) is None), None)
    return [
        (run if run is shown else replace(run, logger=replace(run.logger, progress=False)), team)
        for run, team in pairs
    ]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Key(NamedTuple):
    """What calls have in common that one program computes."""

    name: Hashable  # of the function
    fixed: tuple[tuple[int, Hashable], ...]  # static arguments, by place
    structure: Any  # of the others
    kinds: tuple[Any, ...]  # shape and dtype of each leaf


@dataclass(frozen=True, eq=False)  # each is its own
class Call:
    """What a thread wants computed."""

    key: Key
    function: Callable
    donated: dict[int, Any]  # arguments by place
    kept: dict[int, Any]
    result: Future = field(default_factory=Future)


class Team:
    """Some threads that share their programs, and one more, in `serve`, that runs these.

    Whenever every thread waits for a call, those of one program are computed: of the program that
    was first called the earliest. So a run that is behind (dynamic sampling draws once more, say)
    catches up while the others wait, and they go on side by side.
    """

    def __init__(self, size: int, members: int, programs: "Programs") -> None:
        """`size`: calls that a program computes; `members`: threads, at most as many."""
        self._size, self._live, self._programs = size, members, programs
        self._changed = threading.Condition()
        self._waiting: list[Call] = []
        self._order: dict[Hashable, int] = {}  # of the programs' first calls
        self._stopped: BaseException | None = None

    def jit(
        self,
        function: Callable,
        *,
        static_argnums: int | tuple[int, ...] = (),
        donate_argnums: int | tuple[int, ...] = (),
        compiler_options: dict | None = None,
    ) -> Callable:
        """As `jax.jit`, for positional arguments. Functions of one name are taken for the same:
        what the threads' functions close over must be equal. `compiler_options` are not used: one
        program computes several calls."""
        name, static, donate = _name(function), _places(static_argnums), _places(donate_argnums)

        def call(*arguments: Any) -> Any:
            fixed = tuple((i, a) for i, a in enumerate(arguments) if i in static)
            donated = {i: a for i, a in enumerate(arguments) if i in donate}
            kept = {i: a for i, a in enumerate(arguments) if i not in (*static, *donate)}
            leaves, structure = jax.tree.flatten((donated, kept))
            key = Key(name, fixed, structure, tuple(map(jax.typeof, leaves)))
            return self._hand_in(Call(key, function, donated, kept))

        return call

    def leave(self) -> None:
        """This thread has ended; nobody waits for it."""
        with self._changed:
            self._live -= 1
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Every call ends with that error from now on, and those that wait for an answer."""
        with self._changed:
            self._stopped, waiting, self._waiting = error, self._waiting, []
            for call in waiting:
                call.result.set_exception(error)

    def serve(self) -> None:
        """Run what the threads call, until the last one has left. An error within a program is that
        of all its callers."""
        try:
            while calls := self._next():
                for key in dict.fromkeys(call.key for call in calls):
                    self._answer([call for call in calls if call.key == key])
        except BaseException as error:  # or everyone would wait for ever
            self.stop(error)
            raise

    def _next(self) -> list[Call]:
        """The calls to compute now; none once everybody has left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) == self._live)
            first = min((self._order[call.key.name] for call in self._waiting), default=None)
            return [call for call in self._waiting if self._order[call.key.name] == first]

    def _hand_in(self, call: Call) -> Any:
        with self._changed:
            if self._stopped is not None:
                raise self._stopped
            self._order.setdefault(call.key.name, len(self._order))
            self._waiting.append(call)
            self._changed.notify_all()
        return call.result.result()

    def _answer(self, calls: list[Call]) -> None:
        results, error = [], None
        try:
            results = self._programs.compute(calls, self._size)
        except Exception as raised:
            error = raised
        with self._changed:
            asked, self._waiting = self._waiting, [c for c in self._waiting if c not in calls]
            for i, call in enumerate(calls):
                if call not in asked:  # the team was stopped meanwhile
                    continue
                if error is None:
                    call.result.set_result(results[i])
                else:
                    call.result.set_exception(error)


class Programs:
    """What was compiled, for all teams."""

    def __init__(self, vmapped: bool) -> None:
        self._vmapped = vmapped
        self._made: dict[tuple[Key, int], _Program] = {}
        self._turns = threading.Lock()

    def compute(self, calls: list[Call], size: int) -> list[Any]:
        """Their results, by one program. Where they are fewer than `size`, a call that is alone
        (and each, where nothing is vmapped) has the plain one, and others are filled up with the
        first one's arguments: there are no more than these two programs to compile."""
        first, missing = calls[0], size - len(calls)
        if missing and (len(calls) == 1 or not self._vmapped):
            plain = self._program(first, 1)
            return [plain([call.donated], [call.kept])[0] for call in calls]
        donated = [call.donated for call in calls]
        donated += [jax.tree.map(jnp.copy, first.donated) for _ in range(missing)]
        kept = [call.kept for call in calls] + [first.kept] * missing
        return self._program(first, size)(donated, kept)

    def _program(self, example: Call, size: int) -> "_Program":
        with self._turns:
            program = self._made.get((example.key, size))
            if program is None:
                program = self._made[example.key, size] = _Program(example, size, self._vmapped)
            return program


class _Program:
    """(donated arguments, other ones), a list of `size` each -> list of results."""

    def __init__(self, example: Call, size: int, vmapped: bool) -> None:
        function, fixed = example.function, dict(example.key.fixed)

        def one(member: tuple[dict[int, Any], dict[int, Any]]) -> Any:
            given = fixed | member[0] | member[1]
            return function(*(given[place] for place in range(len(given))))

        def together(donated, kept):
            members = list(zip(donated, kept, strict=True))
            if size == 1:
                return [one(members[0])]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
            results = jax.vmap(one)(stacked) if vmapped else jax.lax.map(one, stacked)
            return [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(size)]

        self._compiled = False
        self._turns = threading.Lock()
        self._call = jax.jit(together, donate_argnums=0)

    def __call__(self, donated: list, kept: list) -> list[Any]:
        if self._compiled:
            return self._call(donated, kept)
        with self._turns:  # the other teams wait for it, and don't compile it as well
            results = self._call(donated, kept)
            self._compiled = True
        return results


def _name(function: Callable) -> Hashable:
    """The same in every thread, for what is the same function there."""
    bound: list[Hashable] = []
    while isinstance(function, partial):
        bound += [function.args, tuple(sorted(function.keywords.items()))]
        function = function.func
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", ""), *bound


def _places(argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else argnums
