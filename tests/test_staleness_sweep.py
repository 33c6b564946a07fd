"""The sweep's policy makes data as stale as the bound allows, and its runs are kept."""

from pathlib import Path

import pytest
from rich.console import Console
from staleness_sweep import Outcome, PullLate, Recipe, Variant, bars, draw, markdown, outcome_of, sweep, variants
from support import Scripted, virtually

from staleflow import Config, Report
from staleflow.errors import TrainerError
from staleflow.events import Evaluated, Synced
from staleflow.testing import ScriptedEngine, ScriptedTrainer

RECIPE = Recipe(steps=4, seed=1)
QUIET = Console(quiet=True)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("max_staleness", [0, 1, 4, 16])
@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_data_is_as_stale_as_the_bound_allows(
    scripted: Scripted, max_staleness: int, step_s: float, engines: int
) -> None:
    """Whether the engine or the trainer is the slower one; and no run waits for ever for a version."""
    config = Config(steps=60, batch_size=4, group_size=2, max_staleness=max_staleness)
    run = scripted(
        config,
        coordinator=PullLate(max_staleness),
        engines=[ScriptedEngine(token_s=0.02, capacity=8, seed=seed) for seed in range(engines)],
        trainer=ScriptedTrainer(step_s=step_s),
        held_out=range(4),
    )
    report = run.run()
    assert report.steps == 60
    assert report.staleness_max == max_staleness
    if engines == 1:
        assert report.staleness_mean >= 0.4 * max_staleness
        assert len(run.events_of(Synced)) <= 60 / max(1, max_staleness) + 2


def test_evaluation_gets_the_version_that_it_is_of(scripted: Scripted) -> None:
    config = Config(steps=20, batch_size=2, group_size=2, max_staleness=16, evaluate_every_steps=3)
    run = scripted(config, coordinator=PullLate(16), held_out=range(4))
    run.run()
    assert [event.step for event in run.events_of(Evaluated)] == [0, 3, 6, 9, 12, 15, 18, 20]
    assert all(event.versions[0] >= event.step for event in run.events_of(Evaluated))


def test_every_loss_meets_every_bound_once() -> None:
    chosen = list(variants(["ppo", "decoupled_ppo"], [0, 1, 4]))
    assert [(run.loss, run.max_staleness) for run in chosen if run.pulls == "late"] == [
        (loss, bound) for loss in ("ppo", "decoupled_ppo") for bound in (0, 1, 4)
    ]
    assert [(run.loss, run.max_staleness) for run in chosen if run.pulls == "at once"] == [("decoupled_ppo", 4)]
    assert len({run.folder for run in chosen}) == len(chosen)


class Player:
    """Plays scripted runs, and counts them; those of a loss that is told fail."""

    def __init__(self, scripted: Scripted, failing: str | None = None) -> None:
        self.played: list[Variant] = []
        self._scripted = scripted
        self._failing = failing

    def __call__(self, variant: Variant, recipe: Recipe, folder: Path) -> Report:
        self.played.append(variant)
        config = Config(
            steps=recipe.steps,
            batch_size=2,
            group_size=2,
            max_staleness=variant.max_staleness,
            evaluate_every_steps=2,
        )
        if variant.loss == self._failing:
            raise TrainerError("the loss is not finite")
        run = self._scripted(config, held_out=range(4), run_dir=folder)
        return virtually(run.pipeline.run())


def test_runs_that_have_finished_are_not_run_again(scripted: Scripted, tmp_path: Path) -> None:
    chosen, player = list(variants(["ppo"], [0, 1])), Player(scripted)
    first, failed = sweep(chosen, RECIPE, tmp_path, QUIET, player)
    assert (len(first), failed) == (2, 0)
    assert player.played == chosen
    again, _ = sweep([*chosen, *variants(["ppo"], [4])], RECIPE, tmp_path, QUIET, player)
    assert again[:2] == first
    assert [variant.max_staleness for variant in player.played] == [0, 1, 4]


def test_run_that_was_interrupted_begins_anew(scripted: Scripted, tmp_path: Path) -> None:
    [variant] = variants(["tis"], [1])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    outcome = outcome_of(variant, RECIPE, tmp_path / "run", Player(scripted))
    assert sorted(outcome.accuracy) == [0, 2, 4]
    assert outcome.staleness_histogram.keys() <= {0, 1}


def test_run_that_fails_ends_no_other(scripted: Scripted, tmp_path: Path) -> None:
    chosen, player = list(variants(["ppo", "tis"], [1])), Player(scripted, failing="ppo")
    outcomes, failed = sweep(chosen, RECIPE, tmp_path, QUIET, player)
    assert [outcome.variant.loss for outcome in outcomes] == ["tis"]
    assert failed == 1
    assert player.played == chosen


def test_picture_has_a_column_for_each_loss(scripted: Scripted, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chosen = list(variants(["ppo", "decoupled_ppo"], [0, 4]))
    outcomes, _ = sweep(chosen, RECIPE, tmp_path, QUIET, Player(scripted))
    draw(outcomes, tmp_path, tmp_path / "sweep.svg")
    picture = (tmp_path / "sweep.svg").read_text()
    for text in ("ppo", "decoupled_ppo", "4, pulled at once"):
        assert f"<!-- {text} -->" in picture


def test_recipes_differ_in_their_folder() -> None:
    assert len({Recipe(steps=steps, seed=seed).folder for steps in (200, 300) for seed in (1, 2)}) == 4


def test_histogram_is_drawn_from_zero_to_its_largest() -> None:
    assert bars({0: 8, 1: 4, 4: 1}) == "█▄  ▁"
    assert bars({2: 5}) == "  █"
    assert bars({0: 1}) == "█"


def test_table_has_a_row_of_every_run_and_says_what_it_is_of() -> None:
    outcome = Outcome(
        variant=Variant(loss="ppo", max_staleness=4, pulls="late"),
        date="2026-11-29 20:00 +0000",
        commit="0123456789ab",
        accuracy={0: 0.3, 50: 0.41, 100: 0.52},
        wall_s=71.4,
        staleness_mean=2.25,
        staleness_max=4,
        staleness_histogram={0: 1, 4: 2},
        trainer_wait_s=30.0,
        rollout_wait_s=1.6,
    )
    first, _, heads, _, row = markdown([outcome], RECIPE).splitlines()
    assert "4 steps of 64 groups of 4" in first
    assert "2026-11-29 20:00 +0000" in first
    assert "0123456789ab" in first
    assert heads.count("|") == row.count("|")
    assert row == "| ppo | 4 | late | 2.25 | 4 | `▄   █` | 0.300 | 0.410 | 0.520 | 71 | 30 | 2 |"
