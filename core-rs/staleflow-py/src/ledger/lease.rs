//! `Lease`.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use staleflow_core::ledger;

/// A batch handed to the trainer.
#[pyclass(frozen, eq, hash, module = "staleflow._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Lease(ledger::Lease);

impl From<ledger::Lease> for Lease {
    fn from(lease: ledger::Lease) -> Self {
        Self(lease)
    }
}

#[pymethods]
impl Lease {
    /// The batch's index.
    #[getter]
    fn batch(&self) -> u64 {
        self.0.batch.0
    }

    /// The ids of its groups, in the order they are to be trained.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.groups.iter().map(|group| group.0))
    }

    /// The ids of the groups that had to be in this batch and were not needed for it.
    #[getter]
    fn expired<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.expired.iter().map(|group| group.0))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (groups, expired) = (self.groups(py)?.repr()?, self.expired(py)?.repr()?);
        Ok(format!("Lease(batch={}, groups={groups}, expired={expired})", self.batch()))
    }
}
