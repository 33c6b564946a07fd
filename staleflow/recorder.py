"""The recorder: everything a run measures, on its way to the run folder, the live view and the report.

It is told what has happened and never asks; nothing depends on it but what a person sees.
"""

import logging
from collections.abc import Callable, Mapping

from staleflow import clock
from staleflow._core import StalenessLedger
from staleflow.cut import Recorded
from staleflow.events import Evaluated, Event, Reused, UpdateSkipped
from staleflow.loop_lag import LoopLag
from staleflow.meters import RecentSteps, StalenessMeter
from staleflow.run_folder import RunFolder
from staleflow.statistics import (
    Accounting,
    Evaluation,
    EvaluationProgress,
    FleetStatistics,
    PipelineStatistics,
    Report,
    StepRecord,
)
from staleflow.trainer.agreement import disagreement
from staleflow.trainer.faults import describe
from staleflow.types import StepMetrics, TrainBatch, Trajectory

logger = logging.getLogger("staleflow")


class Recorder:
    """Measures one run.

    Args:
        folder: where events, metrics and the ledger's journal go.
        ledger: of the run; every event comes right after the change of the ledger that it tells of.
        idle_s: seconds, since training began in this process, in which no engine had anything to do.
        resumed: what had been measured by the checkpoint that the run goes on from, if it does.
    """

    def __init__(
        self, folder: RunFolder, ledger: StalenessLedger, idle_s: Callable[[], float], resumed: Recorded | None = None
    ) -> None:
        self.lag = LoopLag()
        self._folder = folder
        self._ledger = ledger
        self._idle_s = idle_s
        self._training_since_s: float | None = None
        self._staleness = StalenessMeter()
        self._recent = RecentSteps()
        self.evaluations: list[Evaluation] = []
        self._skipped_updates = 0
        self._agreement_checked = False
        if resumed is None:
            ledger.start_journal()
            self.started_s = clock.now()
            self._trained_before_s = self._trainer_wait_s = self._waited_before_s = 0.0
            self._reused_tokens = self._dropped_tokens = 0
        else:
            ledger.continue_journal(resumed.noted_s)
            self.started_s = clock.now() - resumed.t
            self._trained_before_s = resumed.training_s
            self._trainer_wait_s, self._waited_before_s = resumed.trainer_wait_s, resumed.rollout_wait_s
            self._staleness.histogram.update(resumed.staleness_histogram)
            self._staleness.trajectories = resumed.trajectories
            self._staleness.stale_trajectories = resumed.stale_trajectories
            self._reused_tokens, self._dropped_tokens = resumed.reused_tokens, resumed.dropped_tokens
            self.evaluations += resumed.evaluations
            self._skipped_updates = resumed.skipped_updates
        self._rollout_wait_before_s = self._waited_before_s

    def t(self, at_s: float | None = None) -> float:
        """Seconds from the start of the run to a time of the clock; default now."""
        return (clock.now() if at_s is None else at_s) - self.started_s

    def event(self, event: Event) -> None:
        """Something has changed."""
        self._ledger.note_time(event.t)
        self._folder.event(event)

    def keep_journal(self) -> None:
        """Write down how the ledger has changed since this was called last."""
        self._folder.journal(self._ledger.take_journal())

    def flush(self) -> None:
        """Bring the run folder up to date on disk."""
        self.keep_journal()
        self._folder.flush()

    def training_begins(self) -> None:
        """From now on, waiting counts."""
        self._training_since_s = clock.now() - self._trained_before_s

    def step(
        self, batch: TrainBatch, metrics: StepMetrics, *, trainer_wait_s: float, train_s: float, publish_s: float
    ) -> None:
        """A batch has been trained and published."""
        self._check_agreement(metrics)
        self._note_skipped(batch.step, metrics)
        staleness_min, staleness_mean, staleness_max = self._staleness.add(batch)
        self._trainer_wait_s += trainer_wait_s
        rollout_wait_s = self._rollout_wait_s()
        rewards = [trajectory.reward or 0.0 for trajectory in batch.trajectories]
        record = StepRecord(
            step=batch.step,
            t=self.t(),
            reward_mean=sum(rewards) / len(rewards),
            staleness_min=staleness_min,
            staleness_mean=staleness_mean,
            staleness_max=staleness_max,
            sampled_tokens=metrics.tokens,
            trainer_wait_s=trainer_wait_s,
            rollout_wait_s=rollout_wait_s - self._rollout_wait_before_s,
            train_s=train_s,
            publish_s=publish_s,
            metrics=metrics,
            accuracy=self._accuracy(-1),
            accuracy_version=self.evaluated_step,
        )
        self._rollout_wait_before_s = rollout_wait_s
        self._recent.add(record)
        self._folder.metrics(record)
        self.flush()

    def reused(self, trajectory: Trajectory, tokens: int, dropped: int) -> None:
        """An attempt has taken so many tokens from what was said before a resume, and dropped others."""
        self._reused_tokens += tokens
        self._dropped_tokens += dropped
        group, member, attempt = trajectory.group, trajectory.member, trajectory.attempt
        self.event(Reused(self.t(), group, member, attempt, tokens, dropped))

    def cut(self) -> Recorded:
        """Everything measured so far; brings the run folder up to date with it."""
        t = self.t()
        self._ledger.note_time(t)
        self.flush()
        return Recorded(
            started_s=self.started_s,
            t=t,
            noted_s=self._ledger.noted_s,
            training_s=self._training_s(),
            trainer_wait_s=self._trainer_wait_s,
            rollout_wait_s=self._rollout_wait_s(),
            staleness_histogram=dict(self._staleness.histogram),
            trajectories=self._staleness.trajectories,
            stale_trajectories=self._staleness.stale_trajectories,
            reused_tokens=self._reused_tokens,
            dropped_tokens=self._dropped_tokens,
            evaluations=list(self.evaluations),
            skipped_updates=self._skipped_updates,
        )

    @property
    def evaluated_step(self) -> int | None:
        """The step that was evaluated last; None before the first evaluation."""
        return self.evaluations[-1].step if self.evaluations else None

    def evaluated(self, evaluation: Evaluation) -> None:
        """The held-out tasks have been played."""
        self.evaluations.append(evaluation)
        self.event(
            Evaluated(
                self.t(),
                evaluation.step,
                evaluation.reward_mean,
                evaluation.tasks,
                evaluation.failed,
                evaluation.versions,
            )
        )

    def statistics(
        self,
        *,
        phase: str,
        steps: int,
        running: int,
        waiting: int,
        failed: int,
        fleet: FleetStatistics,
        evaluation: EvaluationProgress | None = None,
    ) -> PipelineStatistics:
        """The state of the run now."""
        ledger = self._ledger.statistics()
        training_s = self._training_s()
        return PipelineStatistics(
            phase=phase,
            step=ledger.published,
            steps=steps,
            elapsed_s=self.t(),
            reward_mean=self._recent.reward_mean,
            accuracy=self._accuracy(-1),
            staleness_mean=self._recent.staleness_mean,
            staleness_max=self._staleness.maximum,
            trainer_wait_share=self._trainer_wait_s / training_s if training_s else 0.0,
            rollout_wait_share=self._rollout_wait_s() / training_s if training_s else 0.0,
            tokens_per_s=self._recent.tokens_per_s,
            live_groups=ledger.running + ledger.complete + ledger.leased,
            running_requests=running,
            waiting_requests=waiting,
            failed_attempts=failed,
            loop_lag_p99_ms=self.lag.quantile_ms(0.99),
            reused_tokens=self._reused_tokens,
            dropped_tokens=self._dropped_tokens,
            fleet=fleet,
            accuracy_version=self.evaluated_step,
            evaluation=evaluation,
            skipped_updates=self._skipped_updates,
        )

    def report(
        self, *, ended: str, failed_attempts: Mapping[str, int], truncated: int, fleet: FleetStatistics
    ) -> Report:
        """What came of the run."""
        ledger = self._ledger.statistics()
        return Report(
            ended=ended,
            steps=ledger.published,
            wall_s=self.t(),
            accuracy_before=self._accuracy(0),
            accuracy_after=self._accuracy(-1),
            held_out_failures=sum(evaluation.failed for evaluation in self.evaluations),
            staleness_max=self._staleness.maximum,
            staleness_mean=self._staleness.mean,
            staleness_histogram=dict(sorted(self._staleness.histogram.items())),
            stale_trajectories=self._staleness.stale_trajectories,
            trained_trajectories=self._staleness.trajectories,
            trained_tokens=self._staleness.histogram.total(),
            trainer_wait_s=self._trainer_wait_s,
            rollout_wait_s=self._rollout_wait_before_s,
            loop_lag_p99_ms=self.lag.quantile_ms(0.99),
            accounting=Accounting(
                admitted=ledger.admitted,
                trained=ledger.trained,
                filtered=dict(ledger.filtered),
                aborted=dict(ledger.aborted),
                expired=ledger.expired,
                running=ledger.running,
                complete=ledger.complete,
                leased=ledger.leased,
                holds=ledger.accounting_holds,
                late_completions=ledger.late_completions,
                failed_attempts=dict(failed_attempts),
                closed_short=ledger.closed_short,
                truncated=truncated,
            ),
            fleet=fleet,
            run_dir=str(self._folder.path),
            reused_tokens=self._reused_tokens,
            dropped_tokens=self._dropped_tokens,
            held_out_tokens=sum(evaluation.sampled_tokens for evaluation in self.evaluations),
            skipped_updates=self._skipped_updates,
        )

    @property
    def best_steps(self) -> list[int]:
        """The steps that were evaluated, best first."""
        best = sorted(self.evaluations, key=lambda evaluation: evaluation.reward_mean, reverse=True)
        return [evaluation.step for evaluation in best]

    def _training_s(self) -> float:
        return 0.0 if self._training_since_s is None else clock.now() - self._training_since_s

    def _rollout_wait_s(self) -> float:
        return self._waited_before_s + self._idle_s()

    def _note_skipped(self, step: int, metrics: StepMetrics) -> None:
        self._skipped_updates += metrics.skipped_updates
        for skipped in metrics.skipped:
            offenders = tuple((one.task, one.group, one.member, one.attempt) for one in skipped.offenders)
            self.event(UpdateSkipped(self.t(), step, skipped.update, skipped.reason, offenders, skipped.dump))
            logger.warning("step %d: %s", step, describe(skipped))

    def _check_agreement(self, metrics: StepMetrics) -> None:
        """Compare trainer and engines once, as soon as a batch has tokens of the trainer's own version."""
        if metrics.agreement is None or self._agreement_checked:
            return
        self._agreement_checked = True
        if (warning := disagreement(metrics.agreement)) is not None:
            logger.warning("%s", warning)

    def _accuracy(self, index: int) -> float | None:
        return self.evaluations[index].reward_mean if self.evaluations else None
