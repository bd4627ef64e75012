"""What a plan assumes of devices. Published peaks; the shares of them are assumed, not measured."""

import difflib
import re
from dataclasses import dataclass

# Shares of the published peak that a program of this kind is assumed to reach.
TRAIN_SHARE = 0.35  # of the FLOP/s: forward and backward passes of the update
SCORE_SHARE = 0.4  # of the FLOP/s: forward passes of a rollout, and prefill
DECODE_SHARE = 0.5  # of the bandwidth, or of the FLOP/s where there are rows enough
LAYER_SECONDS = 3e-5  # at least, for one layer of one pass, however small: launching its kernels
# On a CPU, XLA's own temporary arrays were 1.0 to 1.5 times the plan's in update and rollout,
# and up to 2.1 times in the log-probs, which are never the peak (tests/test_plan.py).
ROOM = 1.5  # what a plan's temporary arrays are multiplied by before they have to fit
USABLE = 0.92  # share of the memory that a program can have


@dataclass(frozen=True)
class Device:
    """Published figures of one chip; dense matmuls, no sparsity."""

    bf16: float  # FLOP/s
    f32: float  # FLOP/s, of matmuls of float32 arrays
    memory: float  # bytes
    bandwidth: float  # bytes/s


# NVIDIA's data sheets (SXM parts where there are several) and Google's pages on Cloud TPU. A T4 has
# no bfloat16. JAX multiplies float32 on a TPU in one bfloat16 pass unless told otherwise.
DEVICES = {
    "t4": Device(bf16=8.1e12, f32=8.1e12, memory=16e9, bandwidth=320e9),
    "l4": Device(bf16=121e12, f32=30.3e12, memory=24e9, bandwidth=300e9),
    "rtx4090": Device(bf16=165.2e12, f32=82.6e12, memory=24e9, bandwidth=1008e9),
    "a100": Device(bf16=312e12, f32=19.5e12, memory=80e9, bandwidth=2039e9),
    "h100": Device(bf16=989e12, f32=67e12, memory=80e9, bandwidth=3350e9),
    "h200": Device(bf16=989e12, f32=67e12, memory=141e9, bandwidth=4800e9),
    "tpu_v5e": Device(bf16=197e12, f32=197e12, memory=16e9, bandwidth=819e9),
    "tpu_v5p": Device(bf16=459e12, f32=459e12, memory=95e9, bandwidth=2765e9),
    "tpu_v6e": Device(bf16=918e12, f32=918e12, memory=32e9, bandwidth=1640e9),
}


def parse(text: str) -> tuple[int, str]:
    """`h100` -> (1, "h100"), `8xh100` -> (8, "h100"). ValueError for what is no such thing."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z][a-z0-9_]*)", text)
    if found and found[2] in DEVICES:
        return int(found[1] or 1), found[2]
    close = difflib.get_close_matches(found[2] if found else text, DEVICES, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"plan={text}: {meant}true, or a device, or several (plan=8xh100); known: "
        + ", ".join(DEVICES)
    )
