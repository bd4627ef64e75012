"""How programs are compiled, and kept on disk: job 2 of a sweep finds its programs there.

XLA's own compilation cache (`jax_compilation_cache_dir`), which names a program by all that it
depends on. `JAX_ENABLE_COMPILATION_CACHE=false` in the environment turns it off.

Whoever can write there decides what this process runs: the folder is its user's alone.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import jax

MOST = 2**30  # bytes; the default run has 2 MB
LEVEL = "xla_backend_optimization_level"


def quickly() -> dict[str, int] | None:
    """`compiler_options` of `jax.jit` for the sampler, which has a program part for each layer.

    On a CPU it is LLVM's level 2: its 3 takes up to a third longer to compile, and samples no
    quicker. (By 2, an update in bfloat16 runs more than twice as long: docs/performance.md.) A
    level in XLA_FLAGS goes first.
    """
    if jax.default_backend() != "cpu" or LEVEL in os.environ.get("XLA_FLAGS", ""):
        return None
    return {LEVEL: 2}


def keep_compiled(folder: Path) -> str | None:
    """Read compiled programs from `folder` from now on, and write new ones there. No more than
    `MOST` bytes are left there of earlier runs: first go those that were not used for longest.

    Returns why nothing is kept, where nothing can be: the run is the slower for it, and no other.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            return f"compiled programs are not kept for the next run: {folder} is another user's"
        folder.chmod(0o700)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"compiled programs are not kept for the next run: {folder}: {error.strerror}"
    _thin_out(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # the small ones too: a run has 80 of them beside the 6 that take seconds
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return None


def _thin_out(folder: Path) -> None:
    # XLA's own limit (`jax_compilation_cache_max_size`) breaks on a folder that was written without
    # it or by a killed run, and locks a file at each read
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another run is at it too
            facts = path.stat()
            if path.is_file():
                found.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= MOST:
            return
        with suppress(OSError):
            path.unlink()
            left -= size
