//! One interpreter per process: the classes of this module, and what it caches, are objects of the first.

use std::sync::OnceLock;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Makes this module the running interpreter's for as long as the process lives, or says that it is another's.
pub(crate) fn claim(_py: Python<'_>) -> PyResult<()> {
    static OWNER: OnceLock<i64> = OnceLock::new();
    // SAFETY: a thread that is attached, as the token proves, has a current interpreter.
    let this = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    if *OWNER.get_or_init(|| this) == this {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "staleflow._core is in use by another interpreter of this process, and does not support subinterpreters",
    ))
}
