"""Many devices as one mesh: where arrays live on it, and how work on rows is spread over it.

    data    replicas: each has all parameters, and its share of the rows
    fsdp    rows too, and each parameter is cut along its hidden dimension (with its moments and its
            reference). A layer is gathered when it is computed, forward and again backward, and its
            gradient is summed straight into the cut (a reduce-scatter)
    tensor  heads and the MLP's inner dimension; rows are whole

What is cut by rows is written out (`shard_map`): devices meet once in an update, to add up the
gradient, and never in a log-prob pass or in the decode loop. Over `tensor`, XLA sees to it
(automatic SPMD). A batch's tokens, masks and numbers a token are small: every device has them all,
so that statistics over the batch need no exchange.

What is sampled and what is learned don't depend on the mesh, up to the order of float sums: noise
is drawn by global row id, and denominators are counted over the whole minibatch (`learner.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax import hosts
from grpo_jax.screen import say
from grpo_jax.types import TrainingError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)
SPREAD = PartitionSpec(ROWS)  # of arrays whose first axis is rows

# Logical axes of the parameters (llama.py has their shapes), by the leaf's own name: moments and
# the reference have the same. What isn't here (norms, adapters) is small, and whole everywhere.
LOGICAL = {
    "embedding": ("vocab", "hidden"),
    "qkv": ("layers", "hidden", "kv_heads", "in_head", "head_dim"),
    "qkv_bias": ("layers", "kv_heads", "in_head", "head_dim"),
    "out": ("layers", "kv_heads", "queries", "head_dim", "hidden"),
    "gate_up": ("layers", "hidden", "two", "inner"),
    "down": ("layers", "inner", "hidden"),
}
RULES = {"hidden": FSDP, "kv_heads": TENSOR, "inner": TENSOR}


@dataclass(frozen=True)
class MeshSettings:
    """`mesh` in the config: devices along each axis; -1 on one of them: all that are left."""

    data: int
    fsdp: int
    tensor: int
    distributed: bool = False  # processes that a launcher started together are one run
    start_seconds: int = 300  # that they have to find one another
    heartbeat_seconds: int = 100  # without a sign of life, after which a process counts as dead

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.fsdp, self.tensor

    @property
    def single(self) -> bool:
        return self.sizes == (1, 1, 1)


def join(settings: MeshSettings) -> None:
    """Become one of the processes of the run, if it has several. Before this, nothing may have
    touched a device. Raises TrainingError (`hosts.join`)."""
    if settings.distributed:
        hosts.join(settings.start_seconds, settings.heartbeat_seconds)


def sizes_for(settings: MeshSettings, devices: int) -> tuple[int, int, int]:
    """With -1 filled in. Raises TrainingError where that many devices can't be arranged so."""
    known = math.prod(size for size in settings.sizes if size != -1)
    data, fsdp, tensor = (devices // known if size == -1 else size for size in settings.sizes)
    if data * fsdp * tensor > devices or 0 in (data, fsdp, tensor):
        said = " x ".join(f"{name}={size}" for name, size in zip(AXES, settings.sizes, strict=True))
        raise TrainingError(f"mesh: {said} can't be had of the {devices} devices that there are")
    return data, fsdp, tensor


def misfits(sizes: tuple[int, int, int], rows: int, shape: Any) -> list[str]:
    """Why `rows` of an optimizer step, or a model of that shape (None: unknown), can't be cut so. A
    size of -1 cuts nothing."""
    data, fsdp, tensor = (max(size, 1) for size in sizes)
    cuts = [("data x fsdp", data * fsdp, "prompts x group / minibatches", rows)]
    if shape is not None:
        cuts += [
            ("fsdp", fsdp, "hidden_size", shape.hidden_size),
            ("tensor", tensor, "num_kv_heads", shape.num_kv_heads),
            ("tensor", tensor, "intermediate_size", shape.intermediate_size),
        ]
    return [
        f"mesh: {parts} devices along {axis} can't share out {what} = {size}"
        for axis, parts, what, size in cuts
        if size % parts
    ]


def refuse_misfits(sizes: tuple[int, int, int], rows: int, shape: Any) -> None:
    """Raise TrainingError where there are `misfits`."""
    problems = misfits(sizes, rows, shape)
    if problems:
        raise TrainingError("\n".join(problems))


def place_on(settings: MeshSettings) -> "Placement":
    """The placement on this machine's devices (all processes' ones). Raises TrainingError."""
    devices = jax.devices()
    if settings.single and jax.process_count() == 1:
        if len(devices) > 1:
            say(f"note: one of {len(devices)} devices is used (mesh=data takes all of them)")
        return ONE_DEVICE
    sizes = sizes_for(settings, len(devices))
    used = devices[: math.prod(sizes)]
    if jax.process_count() > 1 and len(used) < len(devices):
        raise TrainingError(
            f"the mesh takes {len(used)} of {len(devices)} devices: with several processes it has "
            "to take all of them (mesh.data=-1)"
        )
    # JAX makes explicit axes by default, under which an ordinary model is an error
    auto = (AxisType.Auto,) * len(AXES)
    return Placement(jax.make_mesh(sizes, AXES, axis_types=auto, devices=used))


@dataclass(frozen=True)
class Placement:
    """A mesh, or None for the default device: then nothing is placed, cut or gathered."""

    mesh: Mesh | None = None

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.shape[axis]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.size(DATA), self.size(FSDP), self.size(TENSOR)

    @property
    def shards(self) -> int:
        """How many parts rows are dealt into."""
        return self.size(DATA) * self.size(FSDP)

    # ------------------------------------------------------------------ between programs

    def put(self, tree: Any) -> Any:
        """Parameters, or a tree with leaves of their names, in their place on the mesh."""
        return self._placed(tree, self.shardings(tree))

    def made(self, function: Callable, params: Any) -> Any:
        """What `function` makes of parameters, in its place; nothing is whole meanwhile."""
        if self.mesh is None:
            return jax.jit(function)(params)
        shardings = self.shardings(jax.eval_shape(function, params))
        return jax.jit(function, out_shardings=shardings)(params)

    def share(self, tree: Any) -> Any:
        """The same arrays on every device; each process has to have the same ones."""
        whole = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return self._placed(tree, jax.tree.map(lambda _: whole, tree))

    def shardings(self, tree: Any) -> Any:
        """Of parameters and what has their names; None everywhere without a mesh."""
        mesh = self.mesh
        if mesh is None:
            return jax.tree.map(lambda _: None, tree)
        return jax.tree.map(partial(NamedSharding, mesh), specs(tree))

    def _placed(self, tree: Any, shardings: Any) -> Any:
        if self.mesh is None:
            return tree  # as it is: programs take it to the device

        def leaf(a, sharding):
            if isinstance(a, jax.Array) and a.sharding == sharding:
                return a
            if jax.process_count() == 1:
                return jax.device_put(a, sharding)
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                data = leaf(np.asarray(jax.random.key_data(a)), sharding)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
            host = np.asarray(a)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(leaf, tree, shardings)

    # ------------------------------------------------------------------ inside a program

    def constrain(self, tree: Any) -> Any:
        """Results that are to lie where parameters do."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lax.with_sharding_constraint, tree, self.shardings(tree))

    def everywhere(self, tree: Any) -> Any:
        """Results that every device is to have: the host reads them, whichever process it is of."""
        if self.mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    def by_rows(self, function: Callable, params: tuple, rows: tuple, results: Any = SPREAD) -> Any:
        """`function(*params, *rows)`, each device with its parameters' cut and its share of rows.

        params: trees of parameters; what has no name of theirs is whole. rows: trees of [B, ...],
        the shards dividing B. Results are rows again, put together in order, unless `results` has
        other specs for them.
        """
        if self.mesh is None:
            return function(*params, *rows)
        given = (*(specs(tree) for tree in params), *(_spread(tree) for tree in rows))
        # where nothing is cut by XLA itself, no axis is left to it
        own = set(AXES) if self.size(TENSOR) == 1 else set(ROWS)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(_only(own, spec) for spec in given),
            out_specs=_only(own, results),
            axis_names=own,
            check_vma=False,  # gradients are summed by hand, once and not in each micro-batch
        )(*params, *rows)

    # ------------------------------------------------------------------ inside `by_rows`

    def gather(self, tree: Any) -> Any:
        """Parameters (also one layer's), whole over fsdp. Gradients are summed over it, and cut."""
        if self.size(FSDP) == 1:
            return tree

        def leaf(path, a):
            spec = _spec(path, a.ndim)
            if FSDP not in spec:
                return a
            return lax.all_gather(a, FSDP, axis=spec.index(FSDP), tiled=True)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    def sum_gradient(self, tree: Any) -> Any:
        """Parameters' gradients, over all rows: what was gathered is summed over fsdp already."""
        if self.shards == 1:
            return tree

        def leaf(path, a):
            return lax.psum(a, (DATA,) if FSDP in _spec(path, a.ndim) else ROWS)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    def total(self, tree: Any) -> Any:
        """Sums over all rows."""
        return tree if self.shards == 1 else lax.psum(tree, ROWS)

    def agreed(self, flag: Any) -> Any:
        """Whether any device says so that takes part in the same gathers."""
        return flag if self.size(FSDP) == 1 else lax.pmax(flag.astype("int32"), FSDP) > 0

    def all_rows(self, tree: Any) -> Any:
        """Every device's rows, in order."""
        return tree if self.shards == 1 else lax.all_gather(tree, ROWS, tiled=True)

    def own_rows(self, tree: Any) -> Any:
        """This device's share of all rows."""
        if self.shards == 1:
            return tree
        index = lax.axis_index(ROWS)

        def leaf(a):
            size = a.shape[0] // self.shards
            return lax.dynamic_slice_in_dim(a, index * size, size)

        return jax.tree.map(leaf, tree)


ONE_DEVICE = Placement()


def specs(tree: Any) -> Any:
    """PartitionSpec of each leaf, by its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: PartitionSpec(*_spec(path, getattr(leaf, "ndim", 0))), tree
    )


def _spec(path: tuple, ndim: int) -> tuple[str | None, ...]:
    """Mesh axis of each dimension; a layer taken out of the stack lacks the first one."""
    name = getattr(path[-1], "key", None) if path else None
    logical = LOGICAL.get(name, ()) if isinstance(name, str) else ()
    found = tuple(RULES.get(axis) for axis in logical)
    return found[len(found) - ndim :] if len(found) >= ndim else ()


def _spread(tree: Any) -> Any:
    return jax.tree.map(lambda _: SPREAD, tree)


def _only(axes: set[str], tree: Any) -> Any:
    """Specs without the mesh axes that are left to XLA."""

    def part(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in axes)
        return None if not kept else kept if isinstance(entry, tuple) else kept[0]

    def leaf(spec):
        return PartitionSpec(*(part(entry) for entry in spec))

    return jax.tree.map(leaf, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))
