//! The only place where an error of the core becomes a Python exception.

use pyo3::PyErrArguments;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use staleflow_core::error::LedgerError;

/// The exception classes of `staleflow.errors` that this module raises.
#[derive(Clone, Copy)]
pub(crate) enum ErrorClass {
    Config,
    UnknownGroup,
    WrongState,
    NotReady,
    VersionOrder,
    Snapshot,
    QueueFull,
    QueueClosed,
    EngineReply,
}

impl ErrorClass {
    /// The exception with this message.
    pub(crate) fn error(self, message: String) -> PyErr {
        self.called_with((message,))
    }

    /// The exception with this message, which gives back what was in hand.
    pub(crate) fn error_with(self, message: String, item: Py<PyAny>) -> PyErr {
        self.called_with((message, item))
    }

    fn called_with(self, arguments: impl PyErrArguments + 'static) -> PyErr {
        Python::attach(|py| match self.class(py) {
            Ok(class) => PyErr::from_type(class.clone(), arguments),
            Err(import_failure) => import_failure,
        })
    }

    /// Imported at the first error, not with this module: `staleflow` itself imports this module.
    fn class(self, py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
        static CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static UNKNOWN_GROUP: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static WRONG_STATE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static NOT_READY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static VERSION_ORDER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static SNAPSHOT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static QUEUE_FULL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static QUEUE_CLOSED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        static ENGINE_REPLY: PyOnceLock<Py<PyType>> = PyOnceLock::new();

        let (class, name) = match self {
            Self::Config => (&CONFIG, "ConfigError"),
            Self::UnknownGroup => (&UNKNOWN_GROUP, "UnknownGroupError"),
            Self::WrongState => (&WRONG_STATE, "WrongStateError"),
            Self::NotReady => (&NOT_READY, "NotReadyError"),
            Self::VersionOrder => (&VERSION_ORDER, "VersionOrderError"),
            Self::Snapshot => (&SNAPSHOT, "SnapshotError"),
            Self::QueueFull => (&QUEUE_FULL, "QueueFull"),
            Self::QueueClosed => (&QUEUE_CLOSED, "QueueClosed"),
            Self::EngineReply => (&ENGINE_REPLY, "EngineReplyError"),
        };
        class.import(py, "staleflow.errors", name)
    }
}

impl From<&LedgerError> for ErrorClass {
    fn from(error: &LedgerError) -> Self {
        match error {
            LedgerError::Argument { .. } => Self::Config,
            LedgerError::UnknownGroup { .. } => Self::UnknownGroup,
            LedgerError::RepeatedGroup { .. }
            | LedgerError::NoMemberFinished { .. }
            | LedgerError::GroupState { .. }
            | LedgerError::MemberState { .. }
            | LedgerError::NoLease { .. }
            | LedgerError::OtherLease { .. } => Self::WrongState,
            LedgerError::LeaseHeld { .. } | LedgerError::NotReady { .. } => Self::NotReady,
            LedgerError::PublishOrder { .. } | LedgerError::TokenVersion { .. } => Self::VersionOrder,
            LedgerError::Foreign(_) | LedgerError::Format { .. } | LedgerError::Damaged { .. } => {
                Self::Snapshot
            }
        }
    }
}

/// The Python exception for an error of the core.
pub(crate) fn raise(error: LedgerError) -> PyErr {
    ErrorClass::from(&error).error(error.to_string())
}
