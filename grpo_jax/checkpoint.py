"""Checkpoints that restore bit for bit (DESIGN.md section 10), on orbax's `CheckpointManager`.

A step is four items, each readable alone: `params` (what is trained: with LoRA the adapters alone),
`opt_state`, `loop` (the key, the step, and the reference policy where it moves) and `meta` (JSON:
the loop's own counters and what describes the run). A save is atomic: a kill leaves a temporary
folder that counts for nothing, and what can't be read for another reason (a disk that lost power)
is stepped over for an older one, with a warning. Saving goes on in the background; `close` the
manager before the run is called complete. Runs in threads of one process (together.py) take turns,
and a save is then waited for.
"""

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from grpo_jax import hosts
from grpo_jax.models.config import Llama3Scaling, LlamaConfig
from grpo_jax.screen import say
from grpo_jax.types import Params, TrainingError, TrainState

if TYPE_CHECKING:  # orbax takes seconds to import, and a run without checkpoints never needs it
    import orbax.checkpoint as ocp

_PART, _UNREADABLE = ".orbax-checkpoint-tmp", "unreadable-"  # in names of folders
_TURNS = threading.Lock()  # orbax numbers what a process does: two saves at a time are mixed up


def open(folder: Path, keep: int | None) -> "ocp.CheckpointManager":
    """The manager of the checkpoints in `folder`.

    Args:
        folder: may be relative: it is resolved now, so a later change of directory does no harm.
        keep: how many of the newest checkpoints stay on disk, at least 1. The folder is made if
            need be, and what a killed save left in it is removed, with a warning.
            None: only read, and change nothing, as beside a run that is still saving.

    Raises:
        ValueError: `keep` below 1.
        FileNotFoundError: there is no such folder to read.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if keep is None:
        if not folder.is_dir():
            raise FileNotFoundError(f"no checkpoints: {folder} is not a folder")
        options = ocp.CheckpointManagerOptions(read_only=True)
    elif keep < 1:
        raise ValueError(f"keep = {keep}: at least the newest checkpoint must stay")
    else:
        for name in sorted(path.name for path in folder.glob(f"*{_PART}*")):
            say(f"WARNING: {folder}/{name}: a save that was cut short; skipped and removed")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "opt_state", "loop")}
    return ocp.CheckpointManager(
        folder, options=options, item_handlers={**handlers, "meta": ocp.JsonCheckpointHandler()}
    )


def save(
    manager: "ocp.CheckpointManager",
    step: int,
    state: TrainState,
    loop: Mapping[str, Any],
    meta: Mapping[str, Any],
) -> None:
    """Save one checkpoint. Returns once the state is copied off; writing goes on in the background.

    Args:
        step: the trainer's step (one rollout each), above every step saved before.
        loop: the loop's own, such as the number of prompts consumed; JSON, restored exactly.
        meta: what describes the run (configuration, versions); anything JSON can hold, and restored
            as JSON restores it (a tuple comes back as a list).

    Raises:
        RuntimeError: nothing was saved, because `step` isn't above the newest checkpoint.
        TypeError: `loop` or `meta` holds what JSON can't.
        TrainingError: it can't be written, or the one before, whose writing went on until now; or
            the state isn't finite (`refuse_nonfinite`), and so is never saved.
    """
    import orbax.checkpoint as ocp

    text = {"loop": dict(loop), "meta": dict(meta)}
    refuse_nonfinite(state, f"the state after step {step}")
    json.dumps(text)  # the background thread would only raise at the next save
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(state.trainable),
        opt_state=ocp.args.StandardSave(state.opt_state),
        loop=ocp.args.StandardSave(_loop_tree(state)),
        meta=ocp.args.JsonSave(text),
    )
    with _TURNS, _writing(manager):
        saved = manager.save(step, args=items)
        if threading.current_thread() is not threading.main_thread():
            manager.wait_until_finished()
    if not saved:  # orbax only says so by its return value
        raise RuntimeError(
            f"checkpoint {step} was not saved: {manager.directory} already holds step"
            f" {manager.latest_step()}"
        )


def wait(manager: "ocp.CheckpointManager") -> None:
    """Return once what is being saved is on disk. Raises TrainingError: it can't be written."""
    with _writing(manager):
        manager.wait_until_finished()


def close(manager: "ocp.CheckpointManager") -> None:
    """`wait`, and let go of it."""
    with _writing(manager):
        manager.close()


def refuse_nonfinite(tree: Any, where: str) -> None:
    """Raise TrainingError, naming some leaves, if any number in them is NaN or infinite."""
    leaves = {n: a for n, a in _leaves(tree).items() if jnp.issubdtype(a.dtype, jnp.inexact)}
    finite = jax.device_get(_finite(leaves))
    bad = [name for name in leaves if not finite[name]]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise TrainingError(f"{where}: not finite: {', '.join(bad[:3])}{more}")


def latest(manager: "ocp.CheckpointManager") -> int | None:
    """The newest complete checkpoint's step, or None."""
    return hosts.first_says("newest checkpoint", manager.latest_step())


def restore(
    manager: "ocp.CheckpointManager", step: int, abstract_state: TrainState
) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
    """The state, `loop` and `meta` of a checkpoint, bit for bit as they were saved.

    Args:
        abstract_state: the state's structure, shapes, dtypes and shardings, as arrays or as
            `jax.ShapeDtypeStruct`; optax's own tuples come back only through it. The shardings are
            this run's and needn't be the saved ones; a leaf without one goes to the default device.

    Raises:
        TrainingError: the checkpoint holds other leaves, shapes or dtypes (orbax alone would cast
            silently), or keys of another random generator.
        Exception: of orbax, of many kinds: it can't be read.
    """
    import orbax.checkpoint as ocp

    target = jax.tree.map(_abstract, abstract_state)
    trees = {
        "params": target.trainable,
        "opt_state": target.opt_state,
        "loop": _loop_tree(target),
    }
    with _TURNS:
        saved = manager.item_metadata(step)
    for name, tree in trees.items():
        _check(f"checkpoint {step}, {name}", _leaves(saved[name].tree), _leaves(tree))
    items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
    args = ocp.args.Composite(**items, meta=ocp.args.JsonRestore())
    with _TURNS:
        restored = manager.restore(step, args=args)
    for name, tree in trees.items():  # a key's generator isn't in the metadata
        _check(f"checkpoint {step}, {name}", _leaves(restored[name]), _leaves(tree))
    state = TrainState(
        trainable=restored["params"],
        opt_state=restored["opt_state"],
        step=restored["loop"]["step"],
        key=restored["loop"]["key"],
        reference=restored["loop"].get("reference"),
    )
    return state, restored["meta"]["loop"], restored["meta"]["meta"]


def restore_newest(
    manager: "ocp.CheckpointManager", abstract_state: TrainState
) -> tuple[int, TrainState, dict[str, Any], dict[str, Any]]:
    """(step, and what `restore` gives) of the newest checkpoint that can be read.

    A newer one that can't be is warned of, and put aside under another name (`unreadable-N`, once
    an older one was read), so that its step can be saved again. Raises TrainingError if there is
    none, and as `restore` does.
    """
    bad: list[int] = []
    for step in hosts.first_says("checkpoints", sorted(manager.all_steps(), reverse=True)):
        restored, problem = None, None
        try:
            restored = restore(manager, step, abstract_state)
        except TrainingError:  # it can be read, and is of another kind of run
            raise
        except Exception as error:
            problem = _unreadable(manager.directory, step, error)
        problems = [text for text in hosts.exchange("restored", problem) if text is not None]
        if restored is None or problems:
            say(f"WARNING: skipped checkpoint {problems[0]}")
            bad.append(step)
            continue
        with hosts.one_first("put aside"):
            for number in bad if hosts.leads() else []:
                _put_aside(Path(manager.directory), number)
        if bad:
            manager.reload()
        return step, *restored
    raise TrainingError(
        f"no checkpoint in {manager.directory} can be read (tried {_listed(bad)}): bring one back, "
        "or remove that folder to begin again"
    )


def _put_aside(folder: Path, step: int) -> None:
    names = (f"{_UNREADABLE}{step}" + "-again" * again for again in range(100))
    free = next(folder / name for name in names if not (folder / name).exists())
    (folder / str(step)).rename(free)


def _unreadable(folder: Any, step: int, error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{step} in {folder}, which can't be read ({type(error).__name__}: {text})"


def _listed(steps: Any) -> str:
    return ", ".join(map(str, steps))


@contextmanager
def _writing(manager: "ocp.CheckpointManager") -> Generator[None]:
    """Any error is that of a save, here or in the background; earlier checkpoints are whole."""
    try:
        yield
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:300]
        raise TrainingError(
            f"a checkpoint can't be written in {manager.directory} ({type(error).__name__}: {text})"
            "; those before are whole. Make room there, and give the same command to go on"
        ) from error


def load_params(folder: Path, step: int | None = None) -> tuple[int, Params, dict[str, Any]]:
    """(step, what was trained, `meta`) of a checkpoint in `folder`: the newest or that of `step`.

    For whoever has no training state to restore into. A newest one that can't be read is stepped
    over, with a warning. Raises TrainingError: there is none, or that of `step` can't be read.
    """
    if not folder.is_dir():
        raise TrainingError(f"no checkpoints: {folder} is not a folder")
    with open(folder, keep=None) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        if not steps:
            raise TrainingError(f"no checkpoints: {folder} holds no complete one")
        if step is not None and step not in steps:
            known = _listed(sorted(steps))
            raise TrainingError(f"{folder} has no checkpoint of step {step}; there are {known}")
        for number in steps if step is None else [step]:
            try:
                return number, *_load(manager, number)
            except Exception as error:
                what = _unreadable(folder, number, error)
                if step is not None:
                    others = _listed(s for s in sorted(steps) if s != step) or "no others"
                    text = f"checkpoint {what}; there are {others}"
                    raise TrainingError(text) from error
                say(f"WARNING: skipped checkpoint {what}")
    raise TrainingError(f"no checkpoint in {folder} can be read (tried {_listed(steps)})")


def _load(manager: "ocp.CheckpointManager", step: int) -> tuple[Params, dict[str, Any]]:
    import orbax.checkpoint as ocp

    shapes = manager.item_metadata(step)["params"].tree
    target = jax.tree.map(lambda a: _abstract(jax.ShapeDtypeStruct(a.shape, a.dtype)), shapes)
    items = {"params": ocp.args.StandardRestore(target), "meta": ocp.args.JsonRestore()}
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    return restored["params"], restored["meta"]["meta"]


# ------------------------------------------------------------------- what describes the model


def describe(config: LlamaConfig, base: Params | None) -> dict[str, Any]:
    """What `meta` says of the model: its shape, and with LoRA which base the adapters are for."""
    return {"shape": asdict(config), "base": None if base is None else fingerprint(base)}


def shape_of(values: dict[str, Any]) -> LlamaConfig:
    """`asdict` of a shape, undone."""
    rest, scaling = dict(values), values["rope_scaling"]
    rest["rope_scaling"] = None if scaling is None else Llama3Scaling(**scaling)
    return LlamaConfig(**rest)


def fingerprint(params: Params) -> str:
    """The same for the same bits on any device; another one, all but surely, for others."""
    sums = jax.device_get(jax.tree.map(_hash, params))
    text = json.dumps({name: int(value) for name, value in _leaves(sums).items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refuse_other_base(saved: str | None, found: str | None) -> None:
    """Raise TrainingError unless these are fingerprints of the same base."""
    if saved != found:
        raise TrainingError(
            "the base model is not the one that these adapters were trained beside: what is in "
            "model.path has changed since (or the warm start was made anew by other code)"
        )


def refuse_different(params: Params) -> None:
    """Raise TrainingError unless all processes of the run begin with the same parameters."""
    if hosts.count() > 1:
        hosts.refuse_different("the first parameters (model.path, warm start)", fingerprint(params))


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(leaf).all() for name, leaf in leaves.items()}


@jax.jit
def _hash(leaf: jax.Array) -> jax.Array:
    """Sum mod 2**32, in any order the same, of the words mixed with their places (by the last steps
    of MurmurHash3)."""
    flat = leaf.reshape(-1)
    word = {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    h = lax.bitcast_convert_type(flat, word).astype(jnp.uint32)
    h = h + lax.iota(jnp.uint32, flat.size) * jnp.uint32(0x9E3779B1)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)


def _loop_tree(state: TrainState) -> dict[str, Any]:
    tree = {"key": state.key, "step": state.step}
    return tree if state.reference is None else tree | {"reference": state.reference}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaf by name. The names of a NamedTuple's fields and of a dict's keys look alike, as orbax
    describes the one by the other."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "dtype"))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def _check(where: str, saved: dict[str, Any], target: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in target if name not in saved]
    problems += [f"{name} is unknown to this run" for name in saved if name not in target]
    for name in target:
        if name in saved and not _same(saved[name], target[name]):
            problems.append(f"{name} is {_text(saved[name])}, this run has {_text(target[name])}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise TrainingError(f"{where}: {'; '.join(problems[:5])}{more}")


def _same(saved: Any, target: Any) -> bool:
    if jax.dtypes.issubdtype(target.dtype, jax.dtypes.prng_key) and saved.dtype == np.uint32:
        return True  # metadata show the words that a typed key wraps, not its type
    return tuple(saved.shape) == tuple(target.shape) and saved.dtype == target.dtype


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
