"""Do engines, tokenizer and trainer belong to one model? Asked once all have started, before anything is sampled."""

from collections.abc import Sequence

from staleflow.engines.base import Engine
from staleflow.errors import ConfigError
from staleflow.types import ModelLimits


def refuse_different_models(engines: Sequence[Engine], trainer: ModelLimits) -> None:
    """Raise :class:`ConfigError` that names two parts whose models or tokenizers cannot be one; what is not reported is
    not compared."""
    known = [
        ("the trainer", trainer.vocabulary),
        *((_name(index), one.vocabulary) for index, one in enumerate(engines)),
    ]
    sizes = [(name, size) for name, size in known if size is not None]
    for name, size in sizes:
        if size != sizes[0][1]:
            raise ConfigError(
                f"{name} has a vocabulary of {size} token ids and {sizes[0][0]} one of {sizes[0][1]}: engines and "
                "trainer must load the same model"
            )
    for index, engine in enumerate(engines):
        _refuse_foreign_tokenizer(_name(index), engine)
        if trainer.max_tokens is not None and engine.max_model_tokens > trainer.max_tokens:
            raise ConfigError(
                f"{_name(index)} serves sequences of up to {engine.max_model_tokens} tokens, and the trainer's model "
                f"takes at most {trainer.max_tokens}: limit the engine, or load the same model"
            )


def _refuse_foreign_tokenizer(name: str, engine: Engine) -> None:
    if engine.tokenizer is None or engine.vocabulary is None:
        return
    largest = max(engine.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= engine.vocabulary:
        raise ConfigError(
            f"the tokenizer of {name} has token id {largest}, and its model a vocabulary of {engine.vocabulary}: the "
            "model folder's tokenizer.json is of another model"
        )


def _name(engine: int) -> str:
    return f"engine {engine}"
