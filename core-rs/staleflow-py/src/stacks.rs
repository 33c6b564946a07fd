//! The Python stacks of all threads, without the interpreter lock.
//!
//! Python's `faulthandler` walks the stacks in a signal handler, which needs no lock. A signal is set aside for it, and
//! the thread that wants the stacks raises it in itself: no system call of any other thread is interrupted, and the
//! stacks are complete when `raise` returns.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::sync::Mutex;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// A signal nobody else has, and the file that its handler writes to.
pub(crate) struct Stacks {
    signal: i32,
    file: Mutex<File>,
}

impl Stacks {
    /// Those of this process. Set up once and kept for as long as it lives: a signal that comes without a handler would
    /// end it.
    pub(crate) fn of_process(py: Python<'_>) -> PyResult<&'static Self> {
        static STACKS: PyOnceLock<Stacks> = PyOnceLock::new();
        STACKS.get_or_try_init(py, || Self::register(py))
    }

    fn register(py: Python<'_>) -> PyResult<Self> {
        let file = tempfile::tempfile()?;
        let signal = free_signal(py)?;
        let keywords = PyDict::new(py);
        keywords.set_item("file", file.as_raw_fd())?;
        keywords.set_item("all_threads", true)?;
        py.import("faulthandler")?.call_method("register", (signal,), Some(&keywords))?;
        Ok(Self { signal, file: Mutex::new(file) })
    }

    /// The stacks at this moment, or why there are none. While another thread runs Python code they may be wrong.
    pub(crate) fn text(&self) -> String {
        self.read().unwrap_or_else(|error| format!("There are none: {error}\n"))
    }

    fn read(&self) -> io::Result<String> {
        let mut file = self.file.lock().map_err(|_| io::Error::other("a thread panicked over the stacks"))?;
        file.set_len(0)?;
        file.rewind()?;
        signal_hook::low_level::raise(self.signal)?;
        file.rewind()?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        if text.is_empty() {
            return Err(io::Error::other(
                "the signal came to nothing; the program may have taken or blocked it",
            ));
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// The last of the real-time signals that has no handler: the first ones are what other libraries take.
fn free_signal(py: Python<'_>) -> PyResult<i32> {
    let signals = py.import("signal")?;
    let bound = |name| signals.getattr(name)?.extract::<i32>();
    for signal in (bound("SIGRTMIN")?..=bound("SIGRTMAX")?).rev() {
        if signals.call_method1("getsignal", (signal,))?.eq(signals.getattr("SIG_DFL")?)? {
            return Ok(signal);
        }
    }
    Err(PyRuntimeError::new_err("no real-time signal is free for the watch over the event loop"))
}
