"""Which process is killed when: decided before the job begins, by a seed alone."""

import random
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")

LAST_SHARE = 0.95
"""No kill is due later in the job, so that each still finds it at work."""


class Victim(StrEnum):
    """What is killed."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    EVERYTHING = "everything"


class Moment(StrEnum):
    """What the job is doing when it is killed."""

    START_UP = "start-up"
    TRAINING = "training"
    SAVING = "saving"
    EVALUATION = "evaluation"


LONGEST_DELAY_S = {Moment.START_UP: 12.0, Moment.TRAINING: 0.5, Moment.SAVING: 0.05, Moment.EVALUATION: 1.5}
"""About as long as each of them takes."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill, due ``delay_s`` into the first such moment after ``step`` has been trained."""

    victim: Victim
    moment: Moment
    step: int
    delay_s: float


def plan(kills: int, *, steps: int, evaluate_every_steps: int, seed: int) -> list[Kill]:
    """So many kills in the order in which they are due, of all victims and moments about equally many.

    Those in training, or saving, are spread over the steps of the job, those in an evaluation over its evaluations;
    where there are too few of these, training takes their place. Those in a start-up come between others.
    """
    rng = random.Random(seed)
    last = max(2, int(LAST_SHARE * steps))
    evaluated = list(range(evaluate_every_steps, last, evaluate_every_steps))
    rng.shuffle(evaluated)
    due: list[tuple[int, Moment]] = []
    starts = 0
    for moment in _evenly(Moment, kills, rng):
        if moment is Moment.START_UP:
            starts += 1
        elif moment is Moment.EVALUATION and evaluated:
            due.append((evaluated.pop(), moment))
        else:
            due.append((rng.randrange(1, last), Moment.SAVING if moment is Moment.SAVING else Moment.TRAINING))
    due.sort()
    for _ in range(starts):
        due.insert(rng.randint(0, len(due)), (0, Moment.START_UP))
    return [
        Kill(victim=victim, moment=moment, step=step, delay_s=rng.uniform(0, LONGEST_DELAY_S[moment]))
        for victim, (step, moment) in zip(_evenly(Victim, kills, rng), due, strict=True)
    ]


def _evenly(kinds: Iterable[Kind], count: int, rng: random.Random) -> list[Kind]:
    """``count`` of them in random order, none more than once more than another."""
    found: list[Kind] = []
    while len(found) < count:
        found += rng.sample(list(kinds), k=len(list(kinds)))
    found = found[:count]
    rng.shuffle(found)
    return found
