//! `StalenessLedger`: each method converts, calls the core's method of the same name, and converts back.

mod admission;
mod config;
mod lease;
mod replay;
mod statistics;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use staleflow_core::ledger::{Finish, Ledger};

pub(crate) use self::admission::{Refusal, refusal_reasons};
pub(crate) use self::lease::Lease;
pub(crate) use self::replay::LedgerReplay;
pub(crate) use self::statistics::LedgerStatistics;

use self::config::Arguments;
use self::replay::{microseconds, seconds};
use crate::errors::raise;
use crate::ids::{
    AttemptArgument, BatchArgument, CountArgument, GroupArgument, Integer, MemberArgument, VersionArgument,
};

/// Decides which group may begin and which batch may be trained, inside a hard staleness bound.
#[pyclass(module = "staleflow._core")]
pub(crate) struct StalenessLedger(Ledger);

/// What admission answers: a group id or a `Refusal`.
#[derive(IntoPyObject)]
enum Admission {
    Admitted(u64),
    Refused(Refusal),
}

#[pymethods]
impl StalenessLedger {
    /// An empty ledger at version 0.
    #[new]
    #[pyo3(
        signature = (*, batch_size, max_staleness, group_size = Integer::Fits(1),
                     extra_groups = Integer::Fits(0), extra_members = Integer::Fits(0)),
        text_signature = "(*, batch_size, max_staleness, group_size=1, extra_groups=0, extra_members=0)"
    )]
    fn new(
        batch_size: Integer<i64>,
        max_staleness: Integer<i64>,
        group_size: Integer<i64>,
        extra_groups: Integer<i64>,
        extra_members: Integer<i64>,
    ) -> PyResult<Self> {
        let arguments = Arguments { batch_size, max_staleness, group_size, extra_groups, extra_members };
        Ok(Self(Ledger::new(arguments.check()?)))
    }

    /// Groups per train step.
    #[getter]
    fn batch_size(&self) -> u64 {
        self.0.config().batch_size()
    }

    /// The staleness bound in published versions.
    #[getter]
    fn max_staleness(&self) -> u64 {
        self.0.config().max_staleness()
    }

    /// Trajectories per group.
    #[getter]
    fn group_size(&self) -> u32 {
        self.0.config().group_size()
    }

    /// Groups admitted beyond the batch size.
    #[getter]
    fn extra_groups(&self) -> u64 {
        self.0.config().extra_groups()
    }

    /// Members played beyond the group size.
    #[getter]
    fn extra_members(&self) -> u32 {
        self.0.config().extra_members()
    }

    /// The batch that `consume` hands out next.
    #[getter]
    fn next_batch(&self) -> u64 {
        self.0.next_batch().0
    }

    /// The newest version that engines can pull.
    #[getter]
    fn published(&self) -> u64 {
        self.0.published().0
    }

    /// Admits one group whose first member goes to an engine of this version.
    fn admit(&mut self, engine_version: VersionArgument) -> Admission {
        match self.0.admit(engine_version.0) {
            Ok(group) => Admission::Admitted(group.0),
            Err(refusal) => Admission::Refused(refusal.into()),
        }
    }

    /// Admits up to n groups, as many as the law allows.
    fn admit_many(&mut self, engine_version: VersionArgument, n: CountArgument) -> Vec<u64> {
        self.0.admit_many(engine_version.0, n.0).into_iter().map(|group| group.0).collect()
    }

    /// How many more groups could be admitted now on an engine of this version.
    fn capacity(&self, engine_version: VersionArgument) -> u64 {
        self.0.capacity(engine_version.0)
    }

    /// Refuses every admission from now on; live groups go on.
    fn drain(&mut self) {
        self.0.drain();
    }

    /// Refuses every admission from now on, as a ledger that is done.
    fn close(&mut self) {
        self.0.close();
    }

    /// The version that no token of this live group is older than.
    fn group_version(&self, group: GroupArgument) -> PyResult<u64> {
        self.0.group_version(group.0).map(|version| version.0).map_err(raise)
    }

    /// Begins a member's first attempt, or its next one if it is running.
    fn start_member(
        &mut self,
        group: GroupArgument,
        member: MemberArgument,
        engine_version: VersionArgument,
    ) -> PyResult<Option<Refusal>> {
        let granted = self.0.start_member(group.0, member.0, engine_version.0).map_err(raise)?;
        Ok(granted.err().map(Refusal::from))
    }

    /// Finishes a member's current attempt. True if that completes the group.
    #[pyo3(
        signature = (group, member, *, min_version = None, attempt = AttemptArgument(0)),
        text_signature = "($self, group, member, *, min_version=None, attempt=0)"
    )]
    fn finish_member(
        &mut self,
        group: GroupArgument,
        member: MemberArgument,
        min_version: Option<VersionArgument>,
        attempt: AttemptArgument,
    ) -> PyResult<bool> {
        let min_version = min_version.map(|version| version.0);
        let finish = self.0.finish_member(group.0, member.0, min_version, attempt.0).map_err(raise)?;
        Ok(finish == Finish::Group)
    }

    /// Completes a running group at once.
    #[pyo3(signature = (group, *, min_version = None))]
    fn complete(&mut self, group: GroupArgument, min_version: Option<VersionArgument>) -> PyResult<()> {
        self.0.complete(group.0, min_version.map(|version| version.0)).map_err(raise)
    }

    /// Completes all of these running groups, or none.
    fn complete_many(&mut self, ids: Vec<GroupArgument>) -> PyResult<()> {
        let groups: Vec<_> = ids.into_iter().map(|group| group.0).collect();
        self.0.complete_many(&groups).map_err(raise)
    }

    /// Completes a running group with the members that have finished.
    fn close_short(&mut self, group: GroupArgument) -> PyResult<()> {
        self.0.close_short(group.0).map_err(raise)
    }

    /// Ends a running or complete group that failed or was cancelled.
    fn abort(&mut self, group: GroupArgument, reason: &str) -> PyResult<()> {
        self.0.abort(group.0, reason).map_err(raise)
    }

    /// Ends a complete group that has nothing to teach.
    fn filter(&mut self, group: GroupArgument, reason: &str) -> PyResult<()> {
        self.0.filter(group.0, reason).map_err(raise)
    }

    /// Whether `consume` would succeed.
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    /// The fewest running groups whose completion makes the next batch ready.
    fn blockers(&self) -> Vec<u64> {
        self.0.blockers().into_iter().map(|group| group.0).collect()
    }

    /// Hands out the next batch.
    fn consume(&mut self) -> PyResult<Lease> {
        self.0.consume().map(Lease::from).map_err(raise)
    }

    /// Makes the held lease final: engines may now serve this version.
    fn publish(&mut self, version: VersionArgument) -> PyResult<()> {
        self.0.publish(version.0).map_err(raise)
    }

    /// Takes a batch back from a trainer that will not publish it.
    fn release(&mut self, batch: BatchArgument) -> PyResult<()> {
        self.0.release(batch.0).map_err(raise)
    }

    /// All terms of the accounting law.
    fn statistics(&self) -> LedgerStatistics {
        self.0.statistics().into()
    }

    /// All state as bytes.
    fn snapshot<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.snapshot())
    }

    /// The ledger that these bytes were taken from.
    #[staticmethod]
    fn restore(data: &[u8]) -> PyResult<Self> {
        Ledger::restore(data).map(Self).map_err(raise)
    }

    /// Keeps a journal from here on.
    fn start_journal(&mut self) {
        self.0.start_journal();
    }

    /// Keeps a journal from here on that is the end of another one.
    fn continue_journal(&mut self, noted_s: f64) {
        self.0.continue_journal(microseconds(noted_s));
    }

    /// Notes when the changes since the last call happened.
    fn note_time(&mut self, now_s: f64) {
        self.0.note_time(microseconds(now_s));
    }

    /// When the newest changes happened, as it was noted.
    #[getter]
    fn noted_s(&self) -> f64 {
        seconds(self.0.noted_us())
    }

    /// What the journal holds since this was called last.
    fn take_journal<'py>(&mut self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.take_journal())
    }

    /// The ledger at every noted time of a journal.
    #[staticmethod]
    fn replay(py: Python<'_>, journal: &[u8]) -> PyResult<LedgerReplay> {
        LedgerReplay::open(py, journal.to_vec())
    }
}
