"""Worker processes that know nothing of their parent's script: what `workers.py` starts."""

from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FunctionType
from typing import Any


class _BareSpawn:
    """`multiprocessing.spawn`, but a child isn't told to import its parent's main module: that is
    scripts/train.py, which would bring jax and Hydra into every worker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(spawn, name)

    @staticmethod
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = spawn.get_preparation_data(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}


class _BarePopen(popen_spawn_posix.Popen):
    # The library's own steps, with the `spawn` above among their globals; nothing is patched
    _launch = FunctionType(
        popen_spawn_posix.Popen._launch.__code__,  # ty: ignore[missing-attribute]
        vars(popen_spawn_posix) | {"spawn": _BareSpawn()},
    )


class _BareProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _BarePopen(process_obj)


class BareContext(SpawnContext):
    """Of one pool, whose processes it knows."""

    def __init__(self) -> None:
        super().__init__()
        self._children: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # ty: ignore
        child = _BareProcess(*arguments, **named)
        self._children = [old for old in self._children if old.exitcode is None] + [child]
        return child

    def kill(self) -> None:
        for child in self._children:
            if child.pid is not None:
                child.kill()
