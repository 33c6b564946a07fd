"""Choosing a loss: names, parameters and the user's own functions, all refused or accepted before anything starts."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.errors import ConfigError
from staleflow.trainer.loss_settings import BY_NAME, LossSettings, M2po, OwnLoss, loss_settings


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a module and a package in it."""
    (tmp_path / "own_losses.py").write_text(
        "def reinforce(policy_logprobs, tokens, *, scale):\n"
        "    raise NotImplementedError\n\n"
        "def outer():\n"
        "    def inner(): ...\n"
        "    return inner\n\n"
        "class Losses:\n"
        "    def method(self): ...\n"
    )
    (tmp_path / "own_package" / "deep").mkdir(parents=True)
    for path in ("own_package/__init__.py", "own_package/deep/__init__.py", "own_package/deep/module.py"):
        (tmp_path / path).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_losses", "own_package", "own_package.deep"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_name_has_a_record_that_crosses_the_wire(name: str) -> None:
    settings = loss_settings(name, {})
    encoded = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(encoded, type=LossSettings) == settings


def test_parameters_are_kept_and_others_stay_at_their_defaults() -> None:
    assert loss_settings("m2po", {"tau": 0.5}) == M2po(tau=0.5)
    settings = loss_settings("seq_mis", {"over": "geometric_mean", "highest": 3})
    assert msgspec.to_builtins(settings) == {
        "type": "seq_mis",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "lowest": 0.5,
        "highest": 3.0,
        "over": "geometric_mean",
    }


def test_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"loss is 'p4o'; it must be one of cispo, .*ppo, .*tis, or your own"):
        loss_settings("p4o", {})


def test_unknown_parameter_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"loss_parameters has 'tua'; sat takes clip_low, .*alpha, kernel, order"):
        loss_settings("sat", {"tua": 1.0})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ppo", {"clip_low": 0.0}),
        ("ppo", {"clip_high": float("nan")}),
        ("ppo", {"clip_high": "wide"}),
        ("sat", {"alpha": 1.1}),
        ("sat", {"kernel": "gauss"}),
        ("seq_tis", {"over": "sum"}),
        ("m2po", {"tau": None}),
    ],
)
def test_value_that_is_not_allowed_is_named(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"loss_parameters of {name} are .* at `\$\.{next(iter(parameters))}`"):
        loss_settings(name, parameters)


@pytest.mark.parametrize("module", ["own_losses", "own_package", "own_package.deep", "own_package.deep.module"])
def test_string_finds_the_folder_that_makes_the_module_importable(own_module: Path, module: str) -> None:
    expected = OwnLoss(function=f"{module}:loss", folder=str(own_module), parameters={"scale": 2.0})
    assert loss_settings(f"{module}:loss", {"scale": 2.0}) == expected


def test_function_of_a_module_is_sent_by_name(own_module: Path) -> None:
    import own_losses  # type: ignore[import-not-found]

    settings = loss_settings(own_losses.reinforce, {})
    assert settings == OwnLoss(function="own_losses:reinforce", folder=str(own_module), parameters={})


def test_function_the_child_cannot_import_is_refused_with_the_fix(own_module: Path) -> None:
    import own_losses

    refused: list[Callable[..., Any]] = [
        lambda policy, tokens: None,
        own_losses.outer(),
        own_losses.Losses.method,
        own_losses.Losses(),
        functools.partial(own_losses.reinforce, scale=1.0),
    ]
    for loss in refused:
        with pytest.raises(ConfigError, match="write it as a function at the top level of a module, with loss_param"):
            loss_settings(loss, {})


def test_function_of_the_main_script_is_refused_with_the_fix(own_module: Path) -> None:
    import own_losses

    own_losses.reinforce.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"reinforce\(\) of the main script.*: move it to a module of its own"):
        loss_settings(own_losses.reinforce, {})


@pytest.mark.parametrize("loss", ["no_such_module:loss", "own_losses:", "own_losses:a b", ":loss", "sys:exit", "a.b:c"])
def test_string_that_names_no_module_is_refused(own_module: Path, loss: str) -> None:
    with pytest.raises(ConfigError, match="it must be 'module:function', of a module that can be imported here"):
        loss_settings(loss, {})


def test_parameter_of_an_own_loss_must_be_plain() -> None:
    with pytest.raises(ConfigError, match=r"at `\$\.parameters"):
        loss_settings("json:dumps", {"weights": [1.0]})  # type: ignore[dict-item]
