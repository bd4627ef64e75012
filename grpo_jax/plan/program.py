"""What a program would need, from its trace alone: bytes at its worst moment, FLOPs of its matmuls.

A trace (`jax.make_jaxpr`) has the program's real arrays and loops, and costs nothing however large
they are. Its values are walked in order, as a compiler would lay them out that fuses elementwise
chains into what reads them and writes in place wherever an array is no longer needed. XLA comes out
near that: tests/test_plan.py compares with its own `memory_analysis`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

# The same bytes under another shape; a matmul reads a transpose as it is.
ALIAS = {"reshape", "squeeze", "expand_dims", "transpose", "optimization_barrier", "copy", "name"}
# One value from one place or a few: computed where it is read, without an array of its own.
FUSED = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil"),
    *("round", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "erf"),
    *("sin", "cos", "pow", "integer_pow", "square", "and", "or", "not", "xor", "eq", "ne", "lt"),
    *("le", "gt", "ge", "is_finite", "select_n", "clamp", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "convert_element_type", "bitcast_convert_type", "add_any"),
    *("reduce_precision", "broadcast_in_dim", "iota", "rev", "slice", "pad", "gather"),
    *("dynamic_slice", "random_bits", "random_wrap", "random_unwrap", "random_fold_in"),
}
# Too dear to be computed anew by every reader.
DEAR = {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos", "pow"}
# They read elementwise chains as they go, and write an array.
READERS = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("argmax", "argmin", "concatenate", "cumsum", "cummax"),
    *("dynamic_update_slice", "scatter", "scatter-add"),
}
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}  # write into their first operand
CALLEE = ("jaxpr", "call_jaxpr")  # where a primitive that is a call keeps the callee
# Loops and branches stay; what they run is a program of its own.
INNER = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}


@dataclass(frozen=True)
class Cost:
    """What one call of a program needs."""

    bytes: int  # of results and intermediate arrays at the worst moment, arguments not counted
    flops: float  # of its matmuls: 2 for each multiply and add


def cost(
    function: Callable,
    *arguments: Any,
    donated: Collection[int] = (),
    trips: int | tuple[int, ...] = 1,
) -> Cost:
    """Trace `function` on the shapes of `arguments` and add up.

    `donated`: numbers of the arguments whose memory it may overwrite. `trips`: how often the body
    of a `while` loop runs, which a trace can't know; of loops within loops, the outer one's first.
    """
    program = _flat(_used(jax.make_jaxpr(function)(*arguments).jaxpr))
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    given = np.repeat([i in donated for i in range(len(arguments))], counts)
    free = [v for v, is_given in zip(program.invars[-len(given) :], given, strict=True) if is_given]
    return Cost(
        _peak(program, reusable=free),
        _flops(program, (trips,) if isinstance(trips, int) else trips),
    )


def _used(jaxpr: Jaxpr) -> Jaxpr:
    """Without what no result depends on, which a compiler leaves out: the gradient of a frozen
    weight, of which the written-out backward passes say nothing."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def kept_for_backward(function: Callable, *arguments: Any) -> int:
    """Bytes that the forward pass of `function` leaves for its backward pass (with respect to the
    first argument), beyond the arguments themselves."""
    first, *rest = arguments

    def residuals(first, *rest):
        return jax.tree.leaves(jax.vjp(lambda x: function(x, *rest), first)[1])

    program = _flat(jax.make_jaxpr(residuals)(first, *rest).jaxpr)
    source = {v: v for v in program.invars}
    for equation in program.equations:  # an argument under another shape is still the argument
        if equation.name in ALIAS:
            source |= {
                out: source.get(v, v)
                for v, out in zip(equation.inputs, equation.outputs, strict=True)
            }
    kept = {source.get(v, v) for v in program.outvars if not isinstance(v, Literal)}
    return sum(_bytes(v) for v in kept - set(program.invars))


# ------------------------------------------------------------------------------ flat programs


@dataclass(eq=False)
class _Value:
    """A variable; those of jax belong to one scope, and a callee may be called twice."""

    aval: Any


@dataclass(frozen=True)
class _Equation:
    name: str
    inputs: list
    outputs: list
    params: dict[str, Any]
    inner: tuple["_Program", ...] = ()  # the body of a loop, or all branches

    @property
    def chains(self) -> bool:
        return self.name in FUSED or self.name in ALIAS


@dataclass(frozen=True)
class _Program:
    """A trace with its calls (jit, checkpoint, custom derivatives) written out; loops stay."""

    invars: list  # constants first
    equations: list[_Equation] = field(default_factory=list)
    outvars: list = field(default_factory=list)


def _flat(jaxpr: Jaxpr) -> _Program:
    scope = {v: _Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    program = _Program(list(scope.values()))
    _write_out(jaxpr, scope, program.equations)
    program.outvars.extend(_lookup(scope, v) for v in jaxpr.outvars)
    return program


def _lookup(scope: dict, v: Any) -> Any:
    return v if isinstance(v, Literal) else scope[v]


def _write_out(jaxpr: Jaxpr, scope: dict, equations: list[_Equation]) -> None:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        callee = next((params[key] for key in CALLEE if key in params), None)
        inputs = [_lookup(scope, v) for v in eqn.invars]
        if callee is None or name in INNER:
            scope.update((v, _Value(v.aval)) for v in eqn.outvars)
            outputs = [scope[v] for v in eqn.outvars]
            found = params[INNER[name]] if name in INNER else ()
            inner = found if isinstance(found, tuple) else (found,)
            programs = tuple(_flat(closed.jaxpr) for closed in inner)
            equations.append(_Equation(name, inputs, outputs, params, programs))
            continue
        body = getattr(callee, "jaxpr", callee)
        inner = {v: _Value(v.aval) for v in body.constvars}
        inner.update(zip(body.invars, inputs, strict=True))
        _write_out(body, inner, equations)
        results = [_lookup(inner, v) for v in body.outvars]
        scope.update(zip(eqn.outvars, results, strict=True))


def _bytes(v: Any) -> int:
    shape, dtype = getattr(v.aval, "shape", ()), getattr(v.aval, "dtype", np.int32)
    try:
        each = np.dtype(dtype).itemsize
    except TypeError:  # a random key: two words of 32 bits
        each = 8
    return math.prod(shape) * each


def _loop(equation: _Equation) -> tuple[int, int]:
    """(constants, carried values) of a loop's body, which takes them first, in this order."""
    if equation.name == "scan":
        return equation.params["num_consts"], equation.params["num_carry"]
    return equation.params["body_nconsts"], len(equation.outputs)


# --------------------------------------------------------------------------------------- FLOPs


def _flops(program: _Program, trips: tuple[int, ...]) -> float:
    total = 0.0
    for equation in program.equations:
        if equation.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.inputs[0].aval.shape
            inner = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * inner * math.prod(equation.outputs[0].aval.shape)
        elif equation.name == "scan":
            total += equation.params["length"] * _flops(equation.inner[0], trips)
        elif equation.name == "while":
            total += trips[0] * _flops(equation.inner[0], trips[1:] or (1,))
        elif equation.name == "cond":
            total += max(_flops(branch, trips) for branch in equation.inner)
    return total


# --------------------------------------------------------------------------------------- bytes


@dataclass(eq=False)
class _Buffer:
    size: int
    own: bool  # allocated by this program, not by its caller
    reusable: bool  # may be overwritten once nothing reads it any more
    last: int = -1  # the equation that needs it for the last time


def _stored(program: _Program) -> set:
    """Values with an array of their own: read as a whole, returned, or too dear to repeat."""
    stored = {v for v in program.outvars if not isinstance(v, Literal)}
    readers: dict[Any, int] = defaultdict(int)
    for equation in reversed(program.equations):
        for out in equation.outputs:
            if not equation.chains or (equation.name in DEAR and readers[out] > 1):
                stored.add(out)
        through = equation.chains or equation.name in READERS
        for place, v in enumerate(equation.inputs):
            if isinstance(v, Literal):
                continue
            readers[v] += 1
            kept = equation.name in ALIAS and equation.outputs[place] in stored
            if kept or not through or (place == 0 and equation.name in IN_PLACE):
                stored.add(v)
    return stored


def _last_needed(program: _Program, stored: set) -> dict[Any, int]:
    """The equation that needs each value for the last time: of a chain, the one that reads it."""
    last = {v: len(program.equations) for v in program.outvars if not isinstance(v, Literal)}
    for index in range(len(program.equations) - 1, -1, -1):
        equation, when = program.equations[index], index
        if equation.chains:
            when = max([index, *(last.get(v, index) for v in equation.outputs if v not in stored)])
        for v in equation.inputs:
            if not isinstance(v, Literal):
                last[v] = max(last.get(v, 0), when)
    return last


def _peak(program: _Program, *, reusable=(), slices=(), written=()) -> int:
    """Most bytes at one time beyond the arguments.

    `reusable`: arguments that may be overwritten. `slices`: arguments that a loop cuts out of
    something larger, copied where they are read as a whole. `written`: results that go straight
    into something larger.
    """
    stored = _stored(program)
    last = _last_needed(program, stored)
    arrays: dict[Any, frozenset[_Buffer]] = {}  # behind each value: its own, or what it is made of
    expiring: dict[int, list[_Buffer]] = defaultdict(list)
    live = peak = 0

    def hold(buffer: _Buffer, v: Any, now: int) -> None:
        arrays[v] = frozenset({buffer})
        buffer.last = max(buffer.last, last.get(v, now))
        expiring[buffer.last].append(buffer)

    for v in program.invars:
        if v not in slices:
            hold(_Buffer(_bytes(v), False, v in reusable), v, -1)
        elif v in stored:
            hold(_Buffer(_bytes(v), True, True), v, -1)
            live += _bytes(v)
        else:
            arrays[v] = frozenset()
    peak = live
    for now, equation in enumerate(program.equations):
        sources = [arrays.get(v, frozenset()) for v in _values(equation.inputs)]
        behind = frozenset().union(*sources)
        for place, out in enumerate(equation.outputs):
            if out not in stored:
                arrays[out] = behind
                continue
            spare = _spare(equation, place, behind, arrays, now, _bytes(out))
            if spare is None:
                spare = _Buffer(0 if out in written else _bytes(out), True, True)
                live += spare.size
            hold(spare, out, now)
        peak = max(peak, live + _inside(equation))
        gone = [b for b in set(expiring.pop(now, ())) if b.last == now and b.own]
        live -= sum(buffer.size for buffer in gone)
    return peak


def _values(inputs: list) -> list:
    return [v for v in inputs if not isinstance(v, Literal)]


def _spare(equation, place, behind, arrays, now, size) -> _Buffer | None:
    """The array that an output may be written into: one that is needed for the last time here."""
    if equation.name in ALIAS:
        own = arrays.get(equation.inputs[place], frozenset())
        return next(iter(own), None)
    if equation.name in IN_PLACE:
        behind = arrays.get(equation.inputs[0], frozenset())
    elif equation.name in ("scan", "while"):
        constants, carried = _loop(equation)
        if place >= carried:
            return None
        skipped = equation.params.get("cond_nconsts", 0) + constants
        v = equation.inputs[skipped + place]
        behind = frozenset() if isinstance(v, Literal) else arrays.get(v, frozenset())
    elif not equation.chains:
        return None
    fits = [b for b in behind if b.reusable and b.last == now and b.size >= size]
    return min(fits, key=attrgetter("size")) if fits else None


def _inside(equation: _Equation) -> int:
    """Bytes of one pass of a loop, or of a branch, beyond what goes in and comes out."""
    if equation.name == "cond":
        return max(_peak(branch) for branch in equation.inner)
    if equation.name not in ("scan", "while"):
        return 0
    (body,), (constants, carried) = equation.inner, _loop(equation)
    start = len(body.invars) - (len(equation.inputs) - equation.params.get("cond_nconsts", 0))
    carry = body.invars[start + constants : start + constants + carried]
    return _peak(
        body,
        reusable=set(carry),
        slices=set(body.invars[start + constants + carried :]),
        written=set(v for v in body.outvars[carried:] if not isinstance(v, Literal)),
    )
