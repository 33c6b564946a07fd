//! `StallAlarm`: the core's alarm, in seconds.

use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::ErrorClass;

/// Seconds, as a Python float.
pub(crate) struct SecondsArgument(pub(crate) Duration);

impl FromPyObject<'_, '_> for SecondsArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let seconds = object.extract::<f64>()?;
        let allowed =
            |_| ErrorClass::Config.error(format!("{seconds} s is not allowed: 0 or more, and finite"));
        Duration::try_from_secs_f64(seconds).map_err(allowed).map(Self)
    }
}

/// When to tell of a thing that stands still.
#[pyclass(module = "staleflow._core")]
pub(crate) struct StallAlarm(staleflow_core::stall::StallAlarm);

#[pymethods]
impl StallAlarm {
    /// An alarm that is quiet until something has stood still for so long.
    #[new]
    fn new(limit_s: SecondsArgument) -> Self {
        Self(staleflow_core::stall::StallAlarm::new(limit_s.0))
    }

    /// It has stood still for so long by now: whether to tell of it.
    fn stands_still(&mut self, lasted_s: SecondsArgument) -> bool {
        self.0.stands_still(lasted_s.0)
    }

    /// It has moved: whether a stall that was told of is over.
    fn moves(&mut self) -> bool {
        self.0.moves()
    }
}
