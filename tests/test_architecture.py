"""The direction of dependencies: types, errors, clock <- stages <- pipeline <- commands and examples."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "staleflow").rglob("*.py"))
FOUNDATIONS = {"clock", "errors", "types"}
STAGES = {"engines", "trainer", "parameter_server", "tasks", "rollout", "run_folder", "view", "process", "queue"}
BUILT_IN_ORDER = ("members", "rollouts", "evaluation", "checkpointing", "training", "pipeline")
COMMANDS = {"__main__", "cli", "bench", "explain", "plot"}
RUN_IN_CHILDREN = {f"engines/{name}.py" for name in ("embedded_server", "nccl_sender", "vllm_weights")} | {
    f"trainer/{name}.py"
    for name in (
        "advantages",
        "aggregation",
        "learner",
        "loss_metrics",
        "losses",
        "rank",
        "sequences",
        "sharding",
        "state",
        "weights",
        "world",
    )
}


def imports(module: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(module.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def own_imports(module: Path) -> set[str]:
    return {name.removeprefix("staleflow.") for name in imports(module) if name.startswith("staleflow.")}


def name_of(module: Path) -> str:
    return str(module.relative_to(ROOT / "staleflow"))


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_stages_meet_only_in_types_and_base(module: Path) -> None:
    stage = Path(name_of(module)).parts[0].removesuffix(".py")
    if stage in FOUNDATIONS:
        assert own_imports(module) <= FOUNDATIONS
    if stage in STAGES:
        others = {name for name in own_imports(module) if name.split(".")[0] in STAGES - {stage, "process"}}
        assert {name for name in others if not name.endswith(".base")} == set()


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_only_the_face_of_the_package_knows_the_pipeline(module: Path) -> None:
    if name_of(module) not in {"__init__.py", "runner.py"}:
        assert "pipeline" not in own_imports(module)


@pytest.mark.parametrize("name", BUILT_IN_ORDER)
def test_what_is_built_first_knows_nothing_of_what_is_built_on_it(name: str) -> None:
    later = BUILT_IN_ORDER[BUILT_IN_ORDER.index(name) + 1 :]
    assert own_imports(ROOT / "staleflow" / f"{name}.py").isdisjoint(later)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_explain_knows_what_a_run_has_left_and_no_part_of_it(module: Path) -> None:
    if name_of(module) == "blockers.py":
        assert own_imports(module) == set()
    if name_of(module).startswith("explain/"):
        others = {name for name in own_imports(module) if name.split(".")[0] != "explain"}
        assert others <= {"_core", "blockers", "config", "errors", "events"}


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_only_commands_know_commands(module: Path) -> None:
    if Path(name_of(module)).parts[0].removesuffix(".py") not in COMMANDS:
        assert not {name.split(".")[0] for name in own_imports(module)} & COMMANDS


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_matplotlib_is_imported_only_where_a_plot_is_drawn(module: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(module, top_level_only=True)}
    assert "matplotlib" not in heavy


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_torch_is_imported_only_in_children(module: Path) -> None:
    if name_of(module) not in RUN_IN_CHILDREN:
        heavy = {name.split(".")[0] for name in imports(module, top_level_only=True)}
        assert not heavy & {"torch", "transformers", "safetensors"}


def test_the_core_depends_on_neither_python_nor_io() -> None:
    manifest = tomllib.loads((ROOT / "core-rs/staleflow-core/Cargo.toml").read_text())
    assert not set(manifest["dependencies"]) & {"pyo3", "tokio", "rand", "chrono"}


def test_the_picture_is_the_same_everywhere() -> None:
    picture = [line.strip() for line in (ROOT / "ARCHITECTURE.md").read_text().split("```")[1].strip().splitlines()]
    for path in ("README.md", "staleflow/pipeline.py"):
        lines = [line.strip() for line in (ROOT / path).read_text().splitlines()]
        assert any(lines[start : start + len(picture)] == picture for start in range(len(lines))), path
