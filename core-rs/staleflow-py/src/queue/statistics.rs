//! `QueueStatistics`.

use pyo3::prelude::*;
use staleflow_core::queue;

/// What went through a queue.
#[pyclass(frozen, eq, module = "staleflow._core")]
#[derive(PartialEq, Eq)]
pub(crate) struct QueueStatistics(queue::Statistics);

impl From<queue::Statistics> for QueueStatistics {
    fn from(statistics: queue::Statistics) -> Self {
        Self(statistics)
    }
}

#[pymethods]
impl QueueStatistics {
    /// Items ever accepted.
    #[getter]
    fn put(&self) -> u64 {
        self.0.put()
    }

    /// Items that the consumer took.
    #[getter]
    fn taken(&self) -> u64 {
        self.0.taken
    }

    /// Items in the queue.
    #[getter]
    fn held(&self) -> u64 {
        self.0.held
    }

    /// Items given back because the queue was full.
    #[getter]
    fn refused(&self) -> u64 {
        self.0.refused
    }

    /// Times that a waiting consumer was woken.
    #[getter]
    fn wakes(&self) -> u64 {
        self.0.wakes
    }

    /// The most items that were ever held at one time.
    #[getter]
    fn high_water(&self) -> u64 {
        self.0.high_water
    }

    fn __repr__(&self) -> String {
        let queue::Statistics { taken, held, refused, wakes, high_water } = self.0;
        format!(
            "QueueStatistics(put={}, taken={taken}, held={held}, refused={refused}, wakes={wakes}, \
             high_water={high_water})",
            self.put()
        )
    }
}
