//! Python integers as the core's ids. One that no id can equal raises the error of an id that does not exist.

use std::num::{NonZeroU32, NonZeroUsize};

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use staleflow_core::ids::{Batch, GroupId, Version};

use crate::errors::ErrorClass;

/// A group id.
pub(crate) struct GroupArgument(pub(crate) GroupId);

/// A policy version.
pub(crate) struct VersionArgument(pub(crate) Version);

/// A batch index.
pub(crate) struct BatchArgument(pub(crate) Batch);

/// A member's index in its group.
pub(crate) struct MemberArgument(pub(crate) usize);

/// An attempt number.
pub(crate) struct AttemptArgument(pub(crate) u64);

/// A number of groups asked for. More than any ledger holds counts as the largest number there is.
pub(crate) struct CountArgument(pub(crate) u64);

/// The batch that an item is due for; 0 if nobody says.
pub(crate) struct DeadlineArgument(pub(crate) Batch);

/// How many items a queue may hold.
pub(crate) struct CapacityArgument(pub(crate) NonZeroU32);

/// How many items to take at most. More than any queue holds counts as the largest number there is.
pub(crate) struct MaxItemsArgument(pub(crate) NonZeroUsize);

/// A Python integer that may not fit the machine's.
pub(crate) enum Integer<T> {
    Fits(T),
    /// Its digits.
    TooWide(String),
}

impl<T> Integer<T> {
    fn or_raise(self, class: ErrorClass, message: impl FnOnce(String) -> String) -> PyResult<T> {
        match self {
            Self::Fits(value) => Ok(value),
            Self::TooWide(digits) => Err(class.error(message(digits))),
        }
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Integer<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match T::extract(object).map_err(Into::into) {
            Ok(value) => Ok(Self::Fits(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                // Python refuses to print integers of thousands of digits.
                let digits =
                    object.str().map_or_else(|_| "a huge integer".to_owned(), |text| text.to_string());
                Ok(Self::TooWide(digits))
            }
            Err(error) => Err(error),
        }
    }
}

impl FromPyObject<'_, '_> for GroupArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let id = object.extract::<Integer<u64>>()?;
        id.or_raise(ErrorClass::UnknownGroup, |digits| format!("no live group has id {digits}"))
            .map(|id| Self(GroupId(id)))
    }
}

impl FromPyObject<'_, '_> for VersionArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let version = object.extract::<Integer<u64>>()?;
        version
            .or_raise(ErrorClass::VersionOrder, |digits| format!("{digits} was never a policy version"))
            .map(|version| Self(Version(version)))
    }
}

impl FromPyObject<'_, '_> for BatchArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let batch = object.extract::<Integer<u64>>()?;
        batch
            .or_raise(ErrorClass::WrongState, |digits| format!("batch {digits} is not out for training"))
            .map(|batch| Self(Batch(batch)))
    }
}

impl FromPyObject<'_, '_> for MemberArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let member = object.extract::<Integer<usize>>()?;
        member.or_raise(ErrorClass::WrongState, |digits| format!("no group has a member {digits}")).map(Self)
    }
}

impl FromPyObject<'_, '_> for AttemptArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let attempt = object.extract::<Integer<u64>>()?;
        attempt.or_raise(ErrorClass::WrongState, |digits| format!("no attempt has number {digits}")).map(Self)
    }
}

impl FromPyObject<'_, '_> for CountArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object.extract::<Integer<u64>>()? {
            Integer::Fits(count) => Ok(Self(count)),
            Integer::TooWide(digits) if object.lt(0)? => {
                Err(ErrorClass::Config.error(format!("n = {digits} is not allowed: 0 groups or more")))
            }
            Integer::TooWide(_) => Ok(Self(u64::MAX)),
        }
    }
}

impl Default for DeadlineArgument {
    fn default() -> Self {
        Self(Batch(0))
    }
}

impl FromPyObject<'_, '_> for DeadlineArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let deadline = object.extract::<Integer<u64>>()?;
        deadline
            .or_raise(ErrorClass::Config, |digits| {
                format!("deadline = {digits} is not allowed: 0 to {}", u64::MAX)
            })
            .map(|deadline| Self(Batch(deadline)))
    }
}

impl FromPyObject<'_, '_> for CapacityArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let reject = |digits: String| format!("capacity = {digits} is not allowed: 1 to {}", u32::MAX);
        let capacity = object.extract::<Integer<u32>>()?.or_raise(ErrorClass::Config, reject)?;
        let capacity =
            NonZeroU32::new(capacity).ok_or_else(|| ErrorClass::Config.error(reject("0".to_owned())))?;
        Ok(Self(capacity))
    }
}

impl FromPyObject<'_, '_> for MaxItemsArgument {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let reject = |digits| {
            Err(ErrorClass::Config.error(format!("max_items = {digits} is not allowed: 1 item or more")))
        };
        match object.extract::<Integer<usize>>()? {
            Integer::Fits(items) => {
                NonZeroUsize::new(items).map_or_else(|| reject("0".to_owned()), |items| Ok(Self(items)))
            }
            Integer::TooWide(digits) if object.lt(0)? => reject(digits),
            Integer::TooWide(_) => Ok(Self(NonZeroUsize::MAX)),
        }
    }
}
