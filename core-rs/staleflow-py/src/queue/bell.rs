//! Wakes a coroutine on its event loop, from any thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit, intern};

/// The waker of one queue. Consumers come and go, each on its own loop; the last one that looked is woken.
#[derive(Default)]
pub(super) struct Bell(Mutex<Option<Sleeper>>);

/// Whom to wake: `event_loop` is asked to call `wake`.
pub(super) struct Sleeper {
    pub(super) event_loop: Py<PyAny>,
    pub(super) wake: Py<PyAny>,
}

impl Bell {
    /// Rings for this sleeper from now on. To be called before the core registers the consumer.
    pub(super) fn hang(&self, sleeper: Sleeper) {
        let before = self.sleeper().replace(sleeper);
        drop(before);
    }

    /// Rings for nobody.
    pub(super) fn unhang(&self) -> Option<Sleeper> {
        self.sleeper().take()
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(sleeper) = &*self.sleeper() {
            visit.call(&sleeper.event_loop)?;
            visit.call(&sleeper.wake)?;
        }
        Ok(())
    }

    fn sleeper(&self) -> MutexGuard<'_, Option<Sleeper>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(sleeper) = self.unhang() {
            // While the interpreter shuts down there is no loop left to be woken.
            let _shut_down = Python::try_attach(|py| sleeper.ring(py));
        }
    }
}

impl Sleeper {
    fn ring(self, py: Python<'_>) {
        let Err(error) = self.call_soon(py) else { return };
        if self.loop_is_closed(py) {
            // Whoever waited there is gone. The item stays for the next one, who looks before waiting.
            return;
        }
        // A signal handler has raised, before or after the loop took notice. To be woken twice does no harm.
        let _interrupted_again = self.call_soon(py);
        error.restore(py);
    }

    fn call_soon(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.event_loop.call_method1(py, intern!(py, "call_soon_threadsafe"), (&self.wake,))
    }

    fn loop_is_closed(&self, py: Python<'_>) -> bool {
        let closed = self.event_loop.call_method0(py, intern!(py, "is_closed"));
        closed.and_then(|closed| closed.is_truthy(py)).unwrap_or(false)
    }
}

/// What a signal handler, such as the one for Ctrl-C, has raised while this thread rang a bell. The put or close that
/// rang it has been done.
pub(super) fn interruption(py: Python<'_>) -> PyResult<()> {
    PyErr::take(py).map_or(Ok(()), Err)
}
