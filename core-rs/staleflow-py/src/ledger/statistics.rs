//! `LedgerStatistics`.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use staleflow_core::ledger;

/// Where all admitted groups are: the terms of the accounting law.
#[pyclass(frozen, eq, module = "staleflow._core")]
#[derive(PartialEq, Eq)]
pub(crate) struct LedgerStatistics(ledger::Statistics);

impl From<ledger::Statistics> for LedgerStatistics {
    fn from(statistics: ledger::Statistics) -> Self {
        Self(statistics)
    }
}

#[pymethods]
impl LedgerStatistics {
    /// Groups ever admitted.
    #[getter]
    fn admitted(&self) -> u64 {
        self.0.admitted
    }

    /// Groups in a batch whose step is published.
    #[getter]
    fn trained(&self) -> u64 {
        self.0.trained
    }

    /// Groups ended for want of a learning signal, by reason.
    #[getter]
    fn filtered(&self) -> BTreeMap<String, u64> {
        self.0.filtered.clone()
    }

    /// Groups ended by failure or cancellation, by reason.
    #[getter]
    fn aborted(&self) -> BTreeMap<String, u64> {
        self.0.aborted.clone()
    }

    /// Groups ended by missing their deadline.
    #[getter]
    fn expired(&self) -> u64 {
        self.0.expired
    }

    /// Live groups with an unfinished member.
    #[getter]
    fn running(&self) -> u64 {
        self.0.running
    }

    /// Finished groups that wait to be consumed.
    #[getter]
    fn complete(&self) -> u64 {
        self.0.complete
    }

    /// Groups in a batch that is held by the trainer or was released.
    #[getter]
    fn leased(&self) -> u64 {
        self.0.leased
    }

    /// The next batch to be consumed.
    #[getter]
    fn next_batch(&self) -> u64 {
        self.0.next_batch.0
    }

    /// The newest published version.
    #[getter]
    fn published(&self) -> u64 {
        self.0.published.0
    }

    /// Member completions that were ignored because their attempt or group was over.
    #[getter]
    fn late_completions(&self) -> u64 {
        self.0.late_completions
    }

    /// Groups that were made complete with fewer members than the group size.
    #[getter]
    fn closed_short(&self) -> u64 {
        self.0.closed_short
    }

    /// Whether the terms add up to the admitted groups.
    #[getter]
    fn accounting_holds(&self) -> bool {
        self.0.accounting_holds()
    }

    fn __repr__(&self) -> String {
        let s = &self.0;
        format!(
            "LedgerStatistics(admitted={}, trained={}, filtered={:?}, aborted={:?}, expired={}, running={}, \
             complete={}, leased={}, next_batch={}, published={}, late_completions={}, closed_short={})",
            s.admitted,
            s.trained,
            s.filtered,
            s.aborted,
            s.expired,
            s.running,
            s.complete,
            s.leased,
            s.next_batch,
            s.published,
            s.late_completions,
            s.closed_short,
        )
    }
}
