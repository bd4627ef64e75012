"""Time the parts of a training step: rollout, log-prob pass, loss and gradient, optimizer, all.

    python scripts/bench.py --size tiny,small --dtype float32,bfloat16 --json bench.jsonl
    python scripts/bench.py --size tiny --what gradient --micro-rows 4 --remat
    python scripts/bench.py --size tiny --dtype float32 --peer "python peer.py --size tiny"
    python scripts/bench.py --device --json "$OUT/bench.jsonl"

Random weights; no token ends an answer, so every row runs its full budget; one minibatch a rollout;
GRPO without KL (--beta for one); AdamW. Each call is made once to compile and --repeats times warm.
Work is the model's own, counted row by row (grpo_jax/timing/shapes.py), so neither sharing prompts
nor recomputing changes it; "of peak" is its rate by that of a matmul measured here, "of bandwidth"
the bytes that must move at least by those of a sum. Tokens are completion tokens. The persistent
compilation cache is off.

--device is one short script for an accelerator: the same figures, then whether sampler and trainer
agree, whether anything compiles after the first step, whether an update moves anything to or from
the host; with --attention xla,cudnn for each. --peer runs ours and another command in turn, each in
a process of its own; the command prints JSON lines with seconds, and --peer-keys says which of its
keys are which part.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.config import load_algorithm
from grpo_jax.models.attention_kernels import NAMES as ATTENTIONS
from grpo_jax.report import markdown
from grpo_jax.timing import device, peer, results
from grpo_jax.timing.machine import Machine
from grpo_jax.timing.machine import measure as measure_machine
from grpo_jax.timing.measure import Compiled, measure
from grpo_jax.timing.programs import Programs, Settings
from grpo_jax.timing.shapes import BYTES, SHAPES, WHAT, Shape
from grpo_jax.types import Algorithm

STDOUT = "-"
REMAT = {"none": False, "dots": "dots", "all": True}  # as llama.build has it
DEVICE_SECONDS = 300  # --device: nothing new begins after this
DEVICE_DTYPES = ["bfloat16", "float32"]  # what matters most comes first
IN_A_STEP = ("rollout", "logprobs")  # parts whose programs a step runs too


class BenchError(RuntimeError):
    """It can't be timed, or is not worth timing; the text says why."""


# --------------------------------------------------------------------------------------- options


def peer_options() -> argparse.ArgumentParser:
    """Those that our side of a comparison, a process of its own, does not get."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--json", metavar="FILE", help="append an object a part; -: print only them"
    )
    parser.add_argument("--peer", metavar="CMD", help="compare with this shell command")
    parser.add_argument("--peer-keys", type=_keys, default=peer.KEYS, metavar="PART=KEY+KEY,...")
    parser.add_argument("--rounds", type=_positive, default=2, help="of ours and the peer's (2)")
    return parser


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        parents=[peer_options()],
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--size", type=_among(SHAPES), help="tiny,small (tiny; --device: both)")
    parser.add_argument("--dtype", type=_among(BYTES), help="float32,bfloat16 (likewise)")
    parser.add_argument("--what", type=_among(WHAT), default=list(WHAT), help=",".join(WHAT))
    parser.add_argument("--repeats", type=_positive, default=5, help="warm calls (5)")
    parser.add_argument("--device", action="store_true", help="short, with checks of a device")
    parser.add_argument(
        "--seconds-limit",
        type=_positive,
        metavar="S",
        help=f"begin nothing new after this long (none; --device: {DEVICE_SECONDS})",
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument("--micro-rows", type=_positive, help="rows of one pass (CPU: 8; else all)")
    how.add_argument("--vocab-chunk", type=_positive, default=8192, help="logits at a time (8192)")
    how.add_argument(
        "--remat",
        nargs="?",
        const="all",
        choices=tuple(REMAT),
        default="none",
        help="compute layers again going back; dots: but for their products",
    )
    how.add_argument("--plain", action="store_true", help="prompts once a row, weights as they lie")
    how.add_argument(
        "--attention", type=_among(ATTENTIONS), default=["xla"], help=",".join(ATTENTIONS)
    )
    how.add_argument("--attention-block", type=_positive, default=1024, help="query slots (1024)")
    how.add_argument("--beta", type=float, default=0.0, help="of a KL in the loss (0: none)")
    shape = parser.add_argument_group("another shape than the size's")
    for name in ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "prompts", "group"):
        shape.add_argument(f"--{name}", type=_positive, metavar="N")
    shape.add_argument("--prompt-slots", type=_positive, metavar="N", help="of the longest prompt")
    shape.add_argument("--shortest-prompt", type=_positive, metavar="N", help="tokens")
    shape.add_argument("--new-tokens", type=_positive, metavar="N")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _among(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown or len(set(names)) < len(names):
            wrong = f"no such thing as {unknown[0]!r}" if unknown else f"{text!r} repeats itself"
            raise argparse.ArgumentTypeError(f"{wrong}; known: {', '.join(known)}")
        return names

    return parse


def _keys(text: str) -> dict[str, tuple[str, ...]]:
    try:
        return peer.parse_keys(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def cases(options: argparse.Namespace) -> list[tuple[Shape, Settings]]:
    """What is to be timed, in order. ValueError for what can't be; nothing has compiled yet."""
    if not 0 <= options.beta < float("inf"):
        raise ValueError(f"--beta {options.beta:g} is not a number from 0")
    sizes = options.size or (list(SHAPES) if options.device else ["tiny"])
    dtypes = options.dtype or (DEVICE_DTYPES if options.device else ["float32"])
    on_cpu = jax.default_backend() == "cpu"
    found = []
    for dtype, size, attention in itertools.product(dtypes, sizes, options.attention):
        shape = reshaped(SHAPES[size], options)
        settings = Settings(
            dtype=dtype,
            micro_rows=options.micro_rows or (shape.micro_rows if on_cpu else shape.rows),
            vocab_chunk=options.vocab_chunk,
            remat=REMAT[options.remat],
            share_prompts=not options.plain,
            turn_weights=False if options.plain else "auto",
            beta=options.beta,
            attention=attention,
            attention_block=options.attention_block,
        )
        found.append((shape, settings))
    if options.peer is not None and (len(found) > 1 or options.device):
        raise ValueError("--peer compares one size and dtype, without --device")
    return found


def reshaped(shape: Shape, options: argparse.Namespace) -> Shape:
    """`shape` with the options that say otherwise. ValueError where they don't go together."""
    model = shape.model
    hidden, heads = options.hidden or model.hidden_size, options.heads or model.num_heads
    if hidden % heads:
        raise ValueError(f"--hidden {hidden} does not divide into {heads} --heads")
    model = replace(
        model,
        vocab_size=options.vocab or model.vocab_size,
        hidden_size=hidden,
        num_layers=options.layers or model.num_layers,
        num_heads=heads,
        num_kv_heads=options.kv_heads or model.num_kv_heads,
        head_dim=hidden // heads,
        intermediate_size=options.ffn or model.intermediate_size,
    )
    slots = options.prompt_slots or shape.prompt_slots
    shortest = options.shortest_prompt or min(shape.shortest, slots)
    if shortest > slots:
        raise ValueError(f"--shortest-prompt {shortest} is more than {slots} --prompt-slots")
    if model.vocab_size < 2:
        raise ValueError("--vocab must be at least 2: token 0 is padding")
    return replace(
        shape,
        model=model,
        prompts=options.prompts or shape.prompts,
        group=options.group or shape.group,
        prompt_slots=slots,
        shortest=shortest,
        new_tokens=options.new_tokens or shape.new_tokens,
    )


# ------------------------------------------------------------------------------------------ runs


def time_all(options: argparse.Namespace, chosen: list[tuple[Shape, Settings]]) -> int:
    """Time them one by one, writing as it goes; then the table."""
    limit = options.seconds_limit or (DEVICE_SECONDS if options.device else float("inf"))
    ends = time.monotonic() + limit
    found = measure_machine()
    records: list[dict[str, Any]] = []
    kl = ("kl=none",) if options.beta == 0 else ("kl=k3", f"kl.coef={options.beta}")
    algorithm = load_algorithm("grpo", *kl)
    for case in chosen:
        for record in time_case_through(options, found, algorithm, *case, ends=ends):
            append(options.json, [record])
            records.append(record)
    checks = [record for record in records if "check" in record]
    if options.json != STDOUT:
        print("\n".join(described(found)))
        print(markdown(results.table([record for record in records if "what" in record])))
        for check in checks:
            print(json.dumps(check))
    return 1 if any(check["passed"] is False for check in checks) else 0


def described(found: Machine) -> list[str]:
    rates = f"{found.float32 / 1e9:.0f} and {found.bfloat16 / 1e9:.0f} GFLOP/s"
    return [
        f"{jax.device_count()} x {found.device} ({found.platform}), jax {jax.__version__}",
        f"matmuls {rates} (float32, bfloat16), memory {found.bandwidth / 1e9:.1f} GB/s",
    ]


def time_case_through(options: argparse.Namespace, *case: Any, ends: float) -> Generator[dict]:
    """`time_case`; where --device finds a case that a device can't do, it says so and goes on."""
    try:
        yield from time_case(options, *case, ends=ends)
    except Exception as error:
        if not options.device:
            raise
        *_, shape, settings = case
        about = {"size": shape.name, "dtype": settings.dtype, "attention": settings.attention}
        said = f"{type(error).__name__}: {error}"[:500]
        yield about | {"check": "runs", "passed": False, "said": said}


def time_case(
    options: argparse.Namespace,
    machine: Machine,
    algorithm: Algorithm,
    shape: Shape,
    settings: Settings,
    *,
    ends: float,
) -> Generator[dict[str, Any]]:
    """A record a part, then those of the checks. Nothing begins after the time `ends`."""
    jax.clear_caches()  # so that each case compiles all it needs, and says so
    programs = Programs(shape, settings, algorithm)
    name = f"{shape.name} {settings.dtype} {settings.attention}"
    needed: dict[str, Compiled] = {}
    for what in options.what:
        if time.monotonic() > ends:
            print(f"{name}: out of time, left out {what} and what follows", file=sys.stderr)
            return
        print(f"{name}: {what}", file=sys.stderr)
        timing, result = measure(getattr(programs, what)(), options.repeats)
        refuse_nonsense(name, what, result)
        del result  # or the next part's memory would have it
        needed[what] = timing.compiled
        for part in IN_A_STEP if what == "step" else ():
            if part in needed:
                needed[what] += needed[part]
        yield results.record(what, shape, settings, machine, timing, needed[what])
    if options.device and time.monotonic() < ends:
        about = {"size": shape.name, "dtype": settings.dtype, "attention": settings.attention}
        for check in device.checks(programs):
            yield about | check


def refuse_nonsense(name: str, what: str, result: Any) -> None:
    """BenchError for a result with NaN or infinities: its time says nothing."""
    for leaf in jax.tree.leaves(result):
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) and not np.isfinite(leaf).all():
            raise BenchError(f"{name}: {what} gave numbers that are not finite")


def compare(options: argparse.Namespace, own: Sequence[str], case: tuple[Shape, Settings]) -> int:
    """Ours and the peer's in turn; a table of ratios."""
    ours = [sys.executable, __file__, *own, "--json", STDOUT]
    ratios, lines = peer.alternate(ours, options.peer, options.peer_keys, options.rounds)
    append(options.json, lines)
    append(options.json, [results.peer_record(r, *case, options.peer) for r in ratios])
    if options.json != STDOUT:
        print(markdown(results.peer_table(ratios)))
    return 0


def append(path: str | None, records: Sequence[dict[str, Any]]) -> None:
    """One line each, at the end of the file."""
    lines = [json.dumps(record) + "\n" for record in records]
    if path == STDOUT:
        sys.stdout.writelines(lines)
    elif path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(lines)


@contextmanager
def no_compilation_cache() -> Generator[None]:
    """Compile seconds are to be real."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = options_parser()
    options = parser.parse_args(words)
    try:
        chosen = cases(options)
        if options.json is not None:
            append(options.json, [])  # a file that can't be written is better found out now
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        if options.peer is not None:
            own = peer_options().parse_known_args(words)[1]
            return compare(options, own, chosen[0])
        with no_compilation_cache():
            return time_all(options, chosen)
    except (BenchError, peer.PeerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
