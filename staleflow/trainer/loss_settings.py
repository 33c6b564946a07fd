"""Which loss trains and with what parameters, as typed records that cross to the child and into the run folder.

A record names its loss by its tag and holds that loss's parameters, with their defaults; the formulas they enter are
in ``losses``, which needs torch and so is out of the controller's reach. ``cap``, ``lowest`` and ``highest`` bound an
importance weight; ``clip_low`` and ``clip_high`` bound a ratio to ``[1 - clip_low, 1 + clip_high]``.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from staleflow.errors import ConfigError

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Quantile: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
Parameter: TypeAlias = bool | int | float | str | None
SequenceScope: TypeAlias = Literal["product", "geometric_mean"]
"""How the ratios of a sequence's tokens make one: their product, or the mean that its length does not inflate."""
AdvantageKind: TypeAlias = Literal["group_normalized", "group", "leave_one_out", "batch_normalized", "constant"]
AggregationKind: TypeAlias = Literal["token_mean", "sequence_mean", "sequence_sum"]


class Ppo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ppo"):
    """The clipped surrogate."""

    clip_low: Positive = 0.2
    clip_high: Positive = 0.2


class DecoupledPpo(Ppo, frozen=True, kw_only=True, tag="decoupled_ppo"):
    """``beyond`` says what becomes of a weight above ``cap``: it is held there, or its token is masked."""

    cap: Positive = 5.0
    beyond: Literal["cap", "mask"] = "cap"


class Tis(Ppo, frozen=True, kw_only=True, tag="tis"):
    """Truncated importance sampling, token by token."""

    cap: Positive = 2.0


class Mis(Ppo, frozen=True, kw_only=True, tag="mis"):
    """Masked importance sampling, token by token."""

    lowest: Positive = 0.5
    highest: Positive = 5.0


class Icepop(Mis, frozen=True, kw_only=True, tag="icepop"):
    """The same formula as ``mis``, under the name of its other source."""


class SeqTis(Tis, frozen=True, kw_only=True, tag="seq_tis"):
    """Truncated importance sampling, sequence by sequence."""

    over: SequenceScope = "product"


class SeqMis(Mis, frozen=True, kw_only=True, tag="seq_mis"):
    """Masked importance sampling, sequence by sequence."""

    over: SequenceScope = "product"


class Cispo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cispo"):
    """A capped weight on the policy gradient."""

    clip_high: Positive = 4.0


class Gspo(Ppo, frozen=True, kw_only=True, tag="gspo"):
    """The clipped surrogate of a sequence's geometric mean ratio, which moves far less than one token's."""

    clip_low: Positive = 3e-4
    clip_high: Positive = 4e-4


class M2po(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="m2po"):
    """``tau`` bounds the second moment of the kept log ratios."""

    tau: Positive = 0.04


class Dis(Ppo, frozen=True, kw_only=True, tag="dis"):
    """A masked weight on the policy gradient."""

    clip_low: Positive = 0.3
    clip_high: Positive = 5.0


class Sat(Ppo, frozen=True, kw_only=True, tag="sat"):
    """``kernel`` is how the clip range shrinks beyond the ``alpha`` quantile; ``order`` is of the Hill kernel."""

    alpha: Quantile = 0.9
    kernel: Literal["hill", "exponential", "step"] = "hill"
    order: Positive = 2.0


class Estr(Ppo, frozen=True, kw_only=True, tag="estr"):
    """``tau``, not published, lets through at an entropy of 1 what ``ppo`` lets through by default."""

    tau: Positive = 0.04
    epsilon: Positive = 0.01


class OwnLoss(msgspec.Struct, frozen=True, kw_only=True, tag="own"):
    """The user's function: ``module:name``, the folder that makes the module importable, keyword arguments."""

    function: str
    folder: str
    parameters: dict[str, Parameter]


BuiltInLoss: TypeAlias = (
    Ppo | DecoupledPpo | Tis | Mis | Icepop | SeqTis | SeqMis | Cispo | Gspo | M2po | Dis | Sat | Estr
)
LossSettings: TypeAlias = BuiltInLoss | OwnLoss
Settings = TypeVar("Settings", bound=LossSettings)


def name_of(settings: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The name that selects the loss."""
    return str(settings.__struct_config__.tag)


BY_NAME: dict[str, type[BuiltInLoss]] = {name_of(settings): settings for settings in get_args(BuiltInLoss)}


def loss_settings(loss: str | Callable[..., Any], parameters: Mapping[str, Parameter]) -> LossSettings:
    """The record of a loss that is chosen by name, by ``"module:function"`` or as a function of a module.

    Raises :class:`ConfigError` for a name, a parameter or a value that is not allowed, and lists what is.
    """
    if not isinstance(loss, str) or ":" in loss:
        function, folder = _of_string(loss) if isinstance(loss, str) else _of_function(loss)
        return _converted(OwnLoss, {"function": function, "folder": folder, "parameters": dict(parameters)}, function)
    if loss not in BY_NAME:
        raise ConfigError(
            f"loss is {loss!r}; it must be one of {', '.join(sorted(BY_NAME))}, or your own as 'module:function'"
        )
    allowed = BY_NAME[loss].__struct_fields__
    for name in parameters:
        if name not in allowed:
            raise ConfigError(f"loss_parameters has {name!r}; {loss} takes {', '.join(allowed)}")
    return _converted(BY_NAME[loss], dict(parameters), loss)


def _converted(kind: type[Settings], values: dict[str, Any], loss: str) -> Settings:
    try:
        return msgspec.convert(values | {"type": name_of(kind)}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"loss_parameters of {loss} are {values}: {error}") from None


def _of_function(loss: Callable[..., Any]) -> tuple[str, str]:
    if not inspect.isfunction(loss) or "<" in loss.__qualname__ or "." in loss.__qualname__:
        raise ConfigError(
            f"loss is {loss!r}; the trainer's process cannot import it: write it as a function at the top level of a "
            "module, with loss_parameters as its keyword arguments"
        )
    if loss.__module__ == "__main__":
        raise ConfigError(
            f"loss is {loss.__qualname__}() of the main script, which the trainer's process cannot import: move it to "
            "a module of its own"
        )
    return _of_string(f"{loss.__module__}:{loss.__qualname__}")


def _of_string(loss: str) -> tuple[str, str]:
    module, _, name = loss.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not found.has_location or not name.isidentifier():
        raise ConfigError(f"loss is {loss!r}; it must be 'module:function', of a module that can be imported here")
    depth = module.count(".") + (found.submodule_search_locations is not None)
    return loss, str(Path(found.origin).absolute().parents[depth])
