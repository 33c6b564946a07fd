//! `LedgerReplay`: an iterator over the moments of a journal.

use pyo3::prelude::*;
use staleflow_core::ledger::journal::Replay;

use super::StalenessLedger;
use crate::errors::raise;

/// Iterates over a journal: at every noted time, that time and the ledger as it was then.
#[pyclass(module = "staleflow._core")]
pub(crate) struct LedgerReplay {
    replay: Replay,
    ledger: Py<StalenessLedger>,
}

impl LedgerReplay {
    pub(super) fn open(py: Python<'_>, journal: Vec<u8>) -> PyResult<Self> {
        let (replay, ledger) = Replay::open(journal).map_err(raise)?;
        Ok(Self { replay, ledger: Py::new(py, StalenessLedger(ledger))? })
    }
}

#[pymethods]
impl LedgerReplay {
    /// The ledger at the moment reached so far: first the one that the journal was started with.
    #[getter]
    fn ledger(&self, py: Python<'_>) -> Py<StalenessLedger> {
        self.ledger.clone_ref(py)
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<(f64, Py<StalenessLedger>)>> {
        let ledger = &mut self.ledger.try_borrow_mut(py)?.0;
        let now_us = self.replay.advance(ledger).map_err(raise)?;
        Ok(now_us.map(|now_us| (seconds(now_us), self.ledger.clone_ref(py))))
    }
}

const MICROSECONDS_PER_S: f64 = 1e6;

/// Saturates: a time before the start or without end is the first or the last there is.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
pub(super) fn microseconds(now_s: f64) -> u64 {
    (now_s * MICROSECONDS_PER_S).round() as u64
}

#[expect(clippy::cast_precision_loss, reason = "exact for three centuries")]
pub(super) fn seconds(now_us: u64) -> f64 {
    now_us as f64 / MICROSECONDS_PER_S
}
