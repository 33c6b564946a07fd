from pathlib import Path
from typing import Any

import pytest
from support import one_turn

from staleflow import Config, EmbeddedEngine, ListTasks, LocalTrainer, Pipeline, StragglerPolicy
from staleflow.errors import ConfigError
from staleflow.testing import ScriptedEngine, ScriptedTrainer


@pytest.mark.parametrize("name", ["steps", "batch_size", "group_size", "max_attempts", "evaluate_every_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_size_below_one_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be at least 1"):
        Config(**{"steps": 1, name: value})


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "batch_size",
        "group_size",
        "max_staleness",
        "extra_groups",
        "extra_members",
        "max_attempts",
        "engine_restarts",
    ],
)
@pytest.mark.parametrize("value", [2.5, 3.0, "3", None])
def test_size_that_is_no_whole_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it must be a whole number"):
        Config(**{"steps": 1, name: value})


@pytest.mark.parametrize("value", [2.5, "3"])
def test_evaluation_interval_may_only_be_a_whole_number_or_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"evaluate_every_steps is .*; it must be a whole number"):
        Config(steps=1, evaluate_every_steps=value)
    assert Config(steps=1, evaluate_every_steps=None).evaluate_every_steps is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_staleness", -1, "at least 0"),
        ("extra_groups", -1, "at least 0"),
        ("extra_members", -1, "at least 0"),
        ("engine_restarts", -1, "at least 0"),
        ("no_engine_timeout_s", 0, "above 0"),
        ("drain_timeout_s", 0, "above 0"),
        ("rollout_timeout_s", 0, "above 0"),
        ("rollout_timeout_s", float("nan"), "above 0"),
        ("stall_warning_s", 0, "above 0, and finite"),
        ("stall_warning_s", float("inf"), "above 0, and finite"),
        ("stall_warning_s", float("nan"), "above 0, and finite"),
        ("max_failure_share", -0.1, "between 0 and 1"),
        ("max_failure_share", 1.1, "between 0 and 1"),
        ("max_failure_share", float("nan"), "between 0 and 1"),
    ],
)
def test_limit_out_of_range_is_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be {allowed}"):
        Config(**{"steps": 1, name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("action", "wait", "one of replace, truncate, close_short"),
        ("patience_s", 0.0, "above 0"),
        ("patience_s", float("nan"), "above 0"),
        ("max_blockers", 0, "at least 1"),
        ("max_blockers", 1.5, "at least 1"),
    ],
)
def test_straggler_setting_out_of_range_is_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be .*{allowed}"):
        StragglerPolicy(**{"action": "replace", name: value})


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="steps"):
        Config(steps=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 2**31),
        ("group_size", 65537),
        ("max_staleness", 1_000_001),
        ("extra_groups", 2**31),
        ("extra_members", 65537),
    ],
)
def test_size_beyond_the_ledger_is_refused_before_anything_starts(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Pipeline(
            tasks=ListTasks([1]),
            rollout=one_turn,
            engines=[ScriptedEngine()],
            trainer=ScriptedTrainer(),
            config=Config(**{"steps": 1, name: value}),
        )


# -- engine and trainer ------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("part", [EmbeddedEngine, LocalTrainer])
def test_unknown_model_is_refused(part: type[EmbeddedEngine | LocalTrainer], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model '.*absent': no such Hugging Face folder"):
        part(tmp_path / "absent")
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"config\.json': no such Hugging Face folder"):
        part(tmp_path / "config.json")


def test_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer .*tokenizer\.json cannot be read"):
        EmbeddedEngine(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 0), ("cache_tokens", -1), ("threads", 0), ("temperature", 0.0), ("temperature", float("nan"))],
)
def test_engine_setting_out_of_range_is_named(model: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        EmbeddedEngine(model, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "reinforce"),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("max_gradient_norm", -1.0),
        ("minibatches", 0),
        ("micro_batch_tokens", 0),
        ("temperature", 0.0),
        ("threads", 0),
        ("step_timeout_s", 0.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
        ("warmup_steps", -1),
        ("decay_steps", 0),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
    ],
)
def test_trainer_setting_out_of_range_is_named(model: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* is"):
        LocalTrainer(model, **{name: value})
