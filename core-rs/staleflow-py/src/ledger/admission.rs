//! `Refusal` and `RefusalReason`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::IntoPyDict;
use staleflow_core::ledger;

/// Each reason's name and value in Python.
const REASONS: [(&str, &str); 5] = [
    ("TOO_OLD", "too_old"),
    ("FROM_FUTURE", "from_future"),
    ("WINDOW_FULL", "window_full"),
    ("DRAINING", "draining"),
    ("CLOSED", "closed"),
];

/// The class `RefusalReason`: a Python `enum.Enum`, so that it iterates, pickles and type-checks like any other.
pub(crate) fn refusal_reasons(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = CLASS.get_or_try_init(py, || {
        let origin = [("module", "staleflow._core"), ("qualname", "RefusalReason")].into_py_dict(py)?;
        let class = py.import("enum")?.getattr("Enum")?.call(("RefusalReason", REASONS), Some(&origin))?;
        class.setattr("__doc__", "Why a legal request cannot be granted now.")?;
        Ok::<_, PyErr>(class.unbind())
    })?;
    Ok(class.bind(py))
}

/// A legal request that cannot be granted now. Falsy; nothing was reserved.
#[pyclass(frozen, eq, hash, module = "staleflow._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Refusal(ledger::Refusal);

impl From<ledger::Refusal> for Refusal {
    fn from(refusal: ledger::Refusal) -> Self {
        Self(refusal)
    }
}

#[pymethods]
impl Refusal {
    /// The kind of refusal, a `RefusalReason`.
    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        refusal_reasons(py)?.getattr(self.name())
    }

    /// The versions or the batch that decided it, for people.
    #[getter]
    fn detail(&self) -> String {
        self.0.to_string()
    }

    #[expect(clippy::unused_self, reason = "Python calls it on an instance")]
    fn __bool__(&self) -> bool {
        false
    }

    fn __repr__(&self) -> String {
        format!("Refusal(reason=RefusalReason.{}, detail={:?})", self.name(), self.detail())
    }
}

impl Refusal {
    fn name(&self) -> &'static str {
        match self.0 {
            ledger::Refusal::TooOld { .. } => "TOO_OLD",
            ledger::Refusal::FromFuture { .. } => "FROM_FUTURE",
            ledger::Refusal::WindowFull { .. } => "WINDOW_FULL",
            ledger::Refusal::Draining => "DRAINING",
            ledger::Refusal::Closed => "CLOSED",
        }
    }
}
