"""The shape of the code base: who may import whom, what lives where, and how long a file may be."""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

from grpo_jax.types import Algorithm

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "grpo_jax"

# A module or folder imports only from rows above its own, and from its own folder.
LAYERS = (
    {"rules", "confidential"},
    {"types", "screen"},
    {
        "kernels",
        "rewards",
        "stats",
        "metrics",
        "compiled",
        "hosts",
        "markdown",
        "names",
        "preemption",
        "template",
    },
    {"models", "tasks", "tokenizer", "sharding"},
    {"refill"},
    {"generate", "loss", "optim", "policy", "knobs", "passes", "answers"},
    {
        "learner",
        "engine",
        "rollout",
        "evaluate",
        "checkpoint",
        "logging",
        "warmstart",
        "report",
        "folder",
        "tabular_loop",
        "tabular_exact",
        "benchmark",
    },
    {"assemble", "recording", "benchmark_report", "sweep"},
    {"records"},
    {"trainer", "check", "replay", "plan", "timing", "benchmark_run"},
    {"typed", "replay_report", "announce", "together"},
    {"config"},
    {"variants", "benchmark_config"},
)
# Inside the package, these libraries are imported here only.
HOMES = {
    "flax": "models",
    "wandb": "logging",
    "hydra": "config",
    "omegaconf": "config",
    "transformers": "tokenizer",
    "datasets": "tasks",
}
# And these import nothing but this, their own folder and the standard library.
CLOSED = {
    "kernels": {"jax", "jaxtyping", "numpy"},
    # no jax: also a worker process imports them
    "rewards": {"numpy", "math_verify", "pebble", "reasoning_gym"},
    "stats": {"numpy", "scipy"},
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted(
    path for folder in ("scripts", "tests", "experiments") for path in (ROOT / folder).rglob("*.py")
)


def name_of(path):
    return str(path.relative_to(ROOT))


def part_of(path):
    """The part of the package that a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source):
    """Every module that a text imports, at its top or inside functions, as dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "grpo_jax":
                yield from (f"grpo_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def violations(part, source):
    """What a file in `part` of the package imports and must not."""
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    for name in imports(source):
        library, *rest = name.split(".")
        if library == "grpo_jax":
            if rest[0] == "__version__":
                continue
            if rest[0] not in layer:
                yield f"{name}, which has no layer"
            elif rest[0] != part and layer[rest[0]] >= layer[part]:
                yield f"{name}, which isn't in a lower layer than {part}"
            elif part == "rewards" and rest[0] != "rewards":
                yield f"{name}: rewards are plain Python and stand alone"
        elif HOMES.get(library, part) != part:
            yield f"{name}, which only {HOMES[library]} imports"
        elif part in CLOSED and library not in CLOSED[part] | sys.stdlib_module_names:
            yield f"{name}, which {part} does without"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_lower_layers(path):
    part = part_of(path)
    if part == "__init__":
        assert list(imports(path.read_text())) == []
        return
    assert any(part in names for names in LAYERS), f"give {part} a layer in {Path(__file__).name}"
    assert list(violations(part, path.read_text())) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kernels", "from grpo_jax import loss"),
        ("kernels", "import scipy"),
        ("loss", "from grpo_jax.learner import make_update"),
        ("loss", "def f():\n    import grpo_jax.optim"),  # the same layer, inside a function
        ("loss", "from flax import nnx"),
        ("trainer", "import wandb"),
        ("trainer", "from omegaconf import DictConfig"),
        ("models", "from transformers import AutoConfig"),
        ("evaluate", "import datasets"),
        ("rewards", "import jax.numpy as jnp"),
        ("rewards", "from grpo_jax.types import Params"),  # which would import jax
        ("trainer", "from grpo_jax.novelty import x"),
    ],
)
def test_the_rule_catches(part, source):
    assert len(list(violations(part, source))) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kernels", "import math\nfrom grpo_jax.kernels.masked import mean\nimport jax.numpy"),
        ("config", "from grpo_jax import trainer\nimport hydra\nfrom omegaconf import OmegaConf"),
        ("logging", "import wandb"),
        ("rewards", "import re\nfrom grpo_jax.rewards.numeric import matches"),
    ],
)
def test_the_rule_allows(part, source):
    assert list(violations(part, source)) == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert len(source.splitlines()) <= LONGEST_FILE
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, functions) and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert long == []
    assert path.name != "utils.py", "name a module by what it does"


AXES = [field.name for field in dataclasses.fields(Algorithm)]


@pytest.mark.skipif(not (ROOT / "conf" / "algorithm").is_dir(), reason="no configuration yet")
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_one_config_group_one_kernel_file_and_one_test_file(axis):
    assert list((ROOT / "conf" / axis).glob("*.yaml"))
    assert (PACKAGE / "kernels" / f"{axis}.py").is_file()
    assert (ROOT / "tests" / "kernels" / f"test_{axis}.py").is_file()
