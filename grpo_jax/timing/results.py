"""Figures of one timed part as a JSON object, and of many as a table."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax

from grpo_jax.timing.machine import Machine
from grpo_jax.timing.measure import Compiled, Timing, device_peak
from grpo_jax.timing.peer import Ratio
from grpo_jax.timing.programs import Settings
from grpo_jax.timing.shapes import Shape, flops, least_bytes

MISSING = "–"


def record(
    what: str,
    shape: Shape,
    settings: Settings,
    machine: Machine,
    timing: Timing,
    compiled: Compiled,
) -> dict[str, Any]:
    """Seconds, bytes, FLOPs and their rates, per second of the fastest warm call.

    `compiled`: what the part needs, programs included that an earlier part compiled. None where a
    figure has no meaning for this part, or the system does not say it. `peak_rss_bytes` is of the
    whole process, so also of what earlier sizes and dtypes have left in it; `load_average` says how
    far the machine was ours alone.
    """
    least, cpu = timing.minimum, min(timing.cpu_seconds)
    tokens = None if what == "optimizer" else shape.tokens
    work = flops(shape, what, reference=settings.beta > 0)
    moved = least_bytes(shape, what, settings.dtype)
    return {
        "size": shape.name,
        "dtype": settings.dtype,
        "what": what,
        "seconds_min": least,
        "seconds_median": timing.median,
        "seconds": list(timing.seconds),
        "cpu_seconds_min": cpu,
        "tokens": tokens,
        "tokens_per_second": _rate(tokens, least),
        "tokens_per_cpu_second": _rate(tokens, cpu),
        "model_flops": work,
        "flops_per_second": _rate(work, least),
        "share_of_matmul_peak": _rate(work, least * machine.peak(settings.dtype)),
        "least_bytes": moved,
        "bytes_per_second": _rate(moved, least),
        "share_of_bandwidth": _rate(moved, least * machine.bandwidth),
        "temp_bytes": compiled.temp_bytes,
        "compiles": len(compiled.programs),
        "compiled": list(compiled.programs),
        "compile_seconds": compiled.seconds,
        "compile_cpu_seconds": compiled.cpu_seconds,
        "first_seconds": timing.first_seconds,
        "recompiled": list(timing.recompiled),
        "peak_rss_bytes": timing.peak_rss,
        "device_peak_bytes": device_peak(),
        "shape": asdict(shape),
        "settings": asdict(settings),
        "machine": asdict(machine),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
    }


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds == 0 else amount / seconds


def table(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A heading, and one row a record."""
    heading = ["size", "dtype", "what", "min s", "median s", "tok/s", "tok/CPU s", "GFLOP/s"]
    heading += ["of peak", "of bandwidth", "temp MB", "programs", "compile s", "CPU s", "RSS MB"]
    return [heading, *map(_row, records)]


def _row(record: dict[str, Any]) -> list[str]:
    attention = record["settings"]["attention"]
    dtype = record["dtype"] + (f" {attention}" if attention != "xla" else "")
    again = f" +{len(record['recompiled'])} warm" if record["recompiled"] else ""
    return [
        record["size"],
        dtype,
        record["what"],
        f"{record['seconds_min']:.4g}",
        f"{record['seconds_median']:.4g}",
        _number(record["tokens_per_second"], ".0f"),
        _number(record["tokens_per_cpu_second"], ".0f"),
        _number(record["flops_per_second"], ".1f", 1e9),
        _number(record["share_of_matmul_peak"], ".1%"),
        _number(record["share_of_bandwidth"], ".1%"),
        _number(record["temp_bytes"], ".1f", 1e6),
        f"{record['compiles']}{again}",
        f"{record['compile_seconds']:.2f}",
        f"{record['compile_cpu_seconds']:.2f}",
        f"{record['peak_rss_bytes'] / 1e6:.0f}",
    ]


def _number(value: float | None, pattern: str, unit: float = 1) -> str:
    return MISSING if value is None else format(value / unit, pattern)


def peer_record(ratio: Ratio, shape: Shape, settings: Settings, command: str) -> dict[str, Any]:
    """Every round of both sides, their least, and the peer's by ours."""
    return {
        "size": shape.name,
        "dtype": settings.dtype,
        "what": ratio.what,
        "peer": command,
        "ours_seconds": list(ratio.ours),
        "peer_seconds": list(ratio.peer),
        "ours_min": min(ratio.ours),
        "peer_min": min(ratio.peer),
        "ratio": ratio.ratio,
        "shape": asdict(shape),
        "settings": asdict(settings),
    }


def peer_table(ratios: Sequence[Ratio]) -> list[list[str]]:
    rows = [["what", "ours min s", "peer min s", "peer / ours", "ours", "peer"]]
    for ratio in ratios:
        each = [" ".join(f"{s:.4g}" for s in side) for side in (ratio.ours, ratio.peer)]
        least = [f"{min(side):.4g}" for side in (ratio.ours, ratio.peer)]
        rows.append([ratio.what, *least, f"{ratio.ratio:.2f}", *each])
    return rows
