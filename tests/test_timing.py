"""grpo_jax/timing: work, measurements, ratios and checks are what they say."""

import json
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.models import lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.plan.program import cost
from grpo_jax.timing import device, peer, results, shapes
from grpo_jax.timing.machine import Machine, _grown
from grpo_jax.timing.measure import Compiled, Timing, measure
from grpo_jax.timing.programs import Programs, Settings
from grpo_jax.timing.shapes import SHAPES, Shape

MACHINE = Machine("fake", "cpu", float32=1e9, bfloat16=4e9, bandwidth=2e6)
# two prompts of 3 or 4 tokens, three answers of 5 tokens each
MODEL = LlamaConfig(40, 16, 2, 4, 2, 4, 24)
SHAPE = Shape("own", MODEL, 2, 3, prompt_slots=4, shortest=3, new_tokens=5, micro_rows=3)
FULL = replace(SHAPE, shortest=4, prompts=3, group=1)  # no padding, and nothing to share
SETTINGS = Settings("float32", 6, 8192, remat=False, share_prompts=False, beta=0.0)

# ---------------------------------------------------------------------------------------- work


def test_work_by_hand():
    """16 x 4 x 12 + 3 x 16 x 24 weights in a layer; 5 tokens of 40 x 16 in the head."""
    shape = replace(SHAPE, shortest=4)
    layers, head = 2 * (768 + 1152), 640
    assert shapes.layer_weights(MODEL) == layers and shapes.head_weights(MODEL) == head
    pair = 4 * 2 * 4 * 4  # scores and values, layers, heads, their width
    forward = 6 * (2 * layers * 9 + pair * 81 + 2 * head * 5)
    assert shapes.forward_flops(shape) == forward
    pairs = 16 + 5 + 6 + 7 + 8  # the prompt's own, then each token with all before it
    rollout = 6 * (2 * layers * 8 + pair * pairs + 2 * head * 5)
    assert shapes.flops(shape, "rollout") == shapes.rollout_flops(shape) == rollout
    assert shapes.flops(shape, "logprobs") == forward
    assert shapes.flops(shape, "gradient") == 3 * forward
    assert shapes.flops(shape, "optimizer") is None
    assert shapes.flops(shape, "step") == rollout + 4 * forward
    assert shapes.flops(shape, "step", reference=True) == rollout + 5 * forward


def test_bytes_by_hand():
    weights = 2 * (768 + 1152) + 640
    assert shapes.least_bytes(SHAPE, "rollout", "bfloat16") == 5 * 2 * weights
    assert shapes.least_bytes(SHAPE, "rollout", "float32") == 5 * 4 * weights
    assert shapes.least_bytes(SHAPE, "optimizer", "bfloat16") == 32 * (weights + 5 * 16)
    assert shapes.least_bytes(SHAPE, "gradient", "float32") is None
    untied = replace(MODEL, tie_embeddings=False)
    assert shapes.parameters(untied) == weights + 640 + 5 * 16


def test_padding_is_no_work():
    shape = replace(SHAPE, prompts=20)
    assert set(shape.lengths) == {3, 4} and shape.lengths[0] == 4 and shape.tokens == 300
    assert replace(SHAPE, prompts=1, prompt_slots=64).lengths == [64]  # the longest is always there
    each = [replace(SHAPE, prompts=1, prompt_slots=n, shortest=n) for n in shape.lengths]
    for work in (shapes.forward_flops, shapes.rollout_flops):
        assert work(shape) == sum(map(work, each))


@cache
def programs_of(shape, settings):
    return Programs(shape, settings, load_algorithm("grpo", "kl=none"))


def traced(shape, settings, what):
    programs = programs_of(shape, settings)
    params = jax.eval_shape(programs.init, programs.key)
    if what == "logprobs":
        return cost(programs.logp, params, programs.given).flops
    if what == "rollout":
        sample, trips = programs.sample, shape.new_tokens - 1
        return cost(lambda params: sample(params).completion, params, trips=trips).flops
    logp = jnp.zeros(programs.given.completion.shape)
    batch = programs.batch(programs.given, logp, None)
    gradient = programs.differentiate
    return cost(gradient, params, batch, programs.bonus, None, programs.key).flops


def attention(shape):
    n = shape.prompt_slots + shape.new_tokens
    return 4 * 2 * 4 * 4 * shape.rows * n**2  # scores and values, layers, heads, their width


def test_work_is_that_of_the_plain_programs():
    """Nearly: causal attention may leave half of the pairs out, and going back may do small things
    once more."""
    forward, pairs = shapes.forward_flops(FULL), attention(FULL)
    assert forward - pairs / 2 <= traced(FULL, SETTINGS, "logprobs") <= forward
    assert traced(FULL, SETTINGS, "gradient") == pytest.approx(3 * forward, rel=0.1)
    # decoding looks at the slots of a row that are still empty, too
    sampled = traced(FULL, SETTINGS, "rollout")
    assert shapes.rollout_flops(FULL) - pairs <= sampled <= shapes.rollout_flops(FULL) + pairs


def test_what_sharing_saves_and_remat_repeats_is_no_work():
    """The programs differ, the work does not: it has no such argument."""
    shape = replace(SHAPE, shortest=4)
    plain = traced(shape, SETTINGS, "logprobs")
    shared = traced(shape, replace(SETTINGS, share_prompts=True), "logprobs")
    assert shared < 0.9 * plain <= 0.9 * shapes.forward_flops(shape)
    again = traced(FULL, replace(SETTINGS, remat=True), "gradient")
    assert again > 1.2 * traced(FULL, SETTINGS, "gradient")


def test_parameters_are_counted_as_the_model_has_them():
    for shape in SHAPES.values():
        programs = programs_of(shape, SETTINGS)
        params = jax.eval_shape(programs.init, programs.key)
        assert shapes.parameters(shape.model) == lora.count(params)


# ------------------------------------------------------------------------------------- measuring


def test_compiles_are_counted_once():
    double = jax.jit(lambda x: 2 * x)
    x = jnp.ones(3)
    timing, result = measure(lambda: double(x), 3)
    assert timing.compiled.programs == ("jit(<lambda>)",) and not timing.recompiled
    assert timing.compiled.seconds > 0 and timing.compiled.temp_bytes is not None
    assert len(timing.seconds) == len(timing.cpu_seconds) == 3
    np.testing.assert_array_equal(result, 2 * x)
    again, _ = measure(lambda: double(x), 2)
    assert again.compiled.programs == () and again.compiled.temp_bytes is None


def test_compiling_in_warm_calls_is_told():
    lengths = iter(range(2, 9))
    triple = jax.jit(lambda x: 3 * x)
    timing, _ = measure(lambda: triple(np.ones(next(lengths))), 2)
    assert timing.compiled.programs == ("jit(<lambda>)",)
    assert timing.recompiled == ("jit(<lambda>)",) * 2


def test_temporary_bytes_are_the_compilers():
    f = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)
    x = jnp.ones((60, 40))
    timing, _ = measure(lambda: f(x), 1)
    said = f.lower(x).compile().memory_analysis().temp_size_in_bytes
    assert timing.compiled.temp_bytes == said > 0


def test_the_best_of_growing_sizes():
    asked = []

    def once(size):
        asked.append(size)
        return 100.0 * size, {1: 1e-3, 2: 4e-3, 3: 6e-3, 4: 1.0}[size]

    assert _grown((1, 2, 3, 4), once) == 100_000  # the third one takes long, and is the last
    assert asked == [1, 2, 3]


def test_records_are_arithmetic():
    compiled = Compiled(("jit(a)", "jit(b)"), 3.0, 4.0, 5)
    timing = Timing((0.5, 0.25, 1.0), (0.75, 1.0, 2.0), 9.0, compiled, (), 7)
    made = results.record("logprobs", SHAPE, SETTINGS, MACHINE, timing, compiled)
    work = shapes.forward_flops(SHAPE)
    assert (made["seconds_min"], made["seconds_median"], made["cpu_seconds_min"]) == (
        0.25,
        0.5,
        0.75,
    )
    assert made["tokens_per_second"] == 30 / 0.25 and made["tokens_per_cpu_second"] == 30 / 0.75
    assert made["flops_per_second"] == work / 0.25
    assert made["share_of_matmul_peak"] == pytest.approx(work / 0.25 / 1e9)
    assert made["share_of_bandwidth"] is None
    half = replace(SETTINGS, dtype="bfloat16")
    made = results.record("rollout", SHAPE, half, MACHINE, timing, compiled)
    work = shapes.rollout_flops(SHAPE)
    assert made["share_of_matmul_peak"] == pytest.approx(work / 0.25 / 4e9)
    assert made["share_of_bandwidth"] == pytest.approx(5 * 2 * 4480 / 0.25 / 2e6)
    row = results.table([made])[1]
    assert row[:5] == ["own", "bfloat16", "rollout", "0.25", "0.5"] and row[-1] == "0"
    assert Compiled((), 1.0, 1.0, None) + compiled == replace(
        compiled, seconds=4.0, cpu_seconds=5.0
    )


# ------------------------------------------------------------------------------------- a device


def test_a_device_that_disagrees_compiles_or_copies_is_found():
    plus = jax.jit(lambda state, batch: (state + batch, {}))
    ones, given = jnp.ones(3), SimpleNamespace(completion=None)
    rollout = SimpleNamespace(sampler_logp=jnp.zeros((1, 2)), mask=np.array([[True, False]]))
    lengths = iter(range(2, 9))
    fake = SimpleNamespace(
        params=lambda: None,
        sample=lambda params: rollout,
        logp=lambda params, rollout: jnp.array([[0.5, 9.0]]),
        step=lambda: lambda: plus(np.ones(next(lengths)), 1.0),
        state=lambda: SimpleNamespace(trainable=None),
        given=given,
        algorithm=load_algorithm("grpo", "kl=none"),
        batch=lambda *parts: np.ones(3),
        updated=lambda state, batch: plus(ones, batch),
    )
    agreement, compiles, transfers = device.checks(fake)
    assert agreement["max_difference"] == 0.5 and agreement["passed"] is None
    assert compiles["passed"] is False and len(compiles["programs"]) == 2
    # a CPU hides what goes to the host
    assert transfers["to_host"] is None and "host-to-device" in transfers["to_device"]
    fake.batch, fake.step = lambda *parts: ones, lambda: lambda: plus(ones, ones)
    agreement, compiles, transfers = device.checks(fake)
    assert compiles["passed"] and transfers["to_device"] is None

    def handed_back(state, batch):
        raise ValueError("Disallowed device-to-host transfer")

    seen = iter((fake.updated, handed_back, fake.updated))
    fake.updated = lambda *given: next(seen)(*given)
    assert device.transfers(fake)["passed"] is False


# ------------------------------------------------------------------------------------- a peer


PEER = "{python} -c \"print('hello'); print('{line}')\""


def peer_command(**values):
    line = json.dumps(values).replace('"', '\\"')
    return PEER.format(python=sys.executable, line=line)


def test_sides_take_turns_and_ratios_are_of_the_least(tmp_path):
    log = tmp_path / "log"
    script = tmp_path / "side.py"
    script.write_text(
        "import json, sys\n"
        "path, side, *values = sys.argv[1:]\n"
        "with open(path, 'a') as file: file.write(side)\n"
        "value = float(values[(open(path).read().count(side) - 1) % len(values)])\n"
        "print('not a figure')\n"
        "line = {'seconds_min': value, 'b': 0.25, 'a': value}\n"
        "for what in ('rollout', 'step'): print(json.dumps(line | {'what': what}))\n"
    )
    ours = [sys.executable, str(script), str(log), "A", "4", "2", "3"]
    theirs = f"{sys.executable} {script} {log} B 6 5.75 8"
    keys = peer.parse_keys("rollout=a+b,step=a+nothing")
    (ratio,), lines = peer.alternate(ours, theirs, keys, 3)
    assert log.read_text() == "ABABAB"
    assert (ratio.ours, ratio.peer) == ((4.0, 2.0, 3.0), (6.25, 6.0, 8.25))
    assert ratio.ratio == 3.0 and [line["seconds_min"] for line in lines[::2]] == [4.0, 2.0, 3.0]
    assert results.peer_table([ratio])[1] == ["rollout", "2", "6", "3.00", "4 2 3", "6.25 6 8.25"]


def test_a_peer_of_no_use_is_told(tmp_path):
    ours = [sys.executable, "-c", """print('{"what": "rollout", "seconds_min": 1}')"""]
    keys = peer.parse_keys(peer.KEYS)
    with pytest.raises(peer.PeerError, match="printed none of the keys"):
        peer.alternate(ours, peer_command(other=1, gen_wall="fast"), keys, 1)
    with pytest.raises(peer.PeerError, match="the peer's command ended with exit status 3"):
        peer.alternate(ours, "exit 3", keys, 1)
