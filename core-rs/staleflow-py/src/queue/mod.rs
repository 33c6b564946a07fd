//! `DeadlineQueue`: the core's producer and consumer in one object. `staleflow/queue.py` lets a coroutine wait on it.
//!
//! Two locks guard what Python may reach from any thread. Neither is ever held while Python code runs, and a finalizer
//! is Python code: what is replaced or taken under a lock is dropped, converted or called after it.

mod bell;
mod statistics;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use staleflow_core::queue::{Consumer, Producer, PutError, Take, bounded};

pub(crate) use self::statistics::QueueStatistics;

use self::bell::{Bell, Sleeper};
use crate::errors::ErrorClass;
use crate::ids::{CapacityArgument, DeadlineArgument, MaxItemsArgument};

/// A bounded queue of Python objects, what is due first in front.
#[pyclass(subclass, frozen, generic, module = "staleflow._core")]
pub(crate) struct DeadlineQueue {
    producer: Producer<Py<PyAny>>,
    consumer: Mutex<Consumer<Py<PyAny>>>,
    bell: Arc<Bell>,
}

impl DeadlineQueue {
    /// A panic inside the lock leaves nothing half done: the core moves items one at a time.
    fn consumer(&self) -> MutexGuard<'_, Consumer<Py<PyAny>>> {
        self.consumer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl DeadlineQueue {
    /// An empty queue.
    #[new]
    fn new(capacity: CapacityArgument) -> Self {
        let bell = Arc::new(Bell::default());
        let (producer, consumer) = bounded(capacity.0, Waker::from(Arc::clone(&bell)));
        Self { producer, consumer: Mutex::new(consumer), bell }
    }

    /// The most items that it holds.
    #[getter]
    fn capacity(&self) -> u32 {
        self.producer.capacity()
    }

    /// Whether it accepts no item any more.
    #[getter]
    fn closed(&self) -> bool {
        self.producer.is_closed()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.producer.held())?)
    }

    /// Puts an item, or raises an error that has it.
    #[pyo3(
        signature = (item, deadline = DeadlineArgument::default()),
        text_signature = "($self, item, deadline=0)"
    )]
    fn try_put(&self, py: Python<'_>, item: Py<PyAny>, deadline: DeadlineArgument) -> PyResult<()> {
        match self.producer.try_put(deadline.0, item) {
            Ok(()) => bell::interruption(py),
            Err(PutError::Full(item)) => {
                let message =
                    format!("the queue holds {} items, its capacity; put this one later", self.capacity());
                Err(ErrorClass::QueueFull.error_with(message, item))
            }
            Err(PutError::Closed(item)) => {
                Err(ErrorClass::QueueClosed.error_with("the queue is closed".to_owned(), item))
            }
        }
    }

    /// Accepts nothing from now on; what is held is still delivered.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.producer.close();
        bell::interruption(py)
    }

    /// Takes up to so many items. Without any, None: the loop will be asked to call `wake`, once, when there is news.
    #[pyo3(name = "_take")]
    fn take(
        &self,
        max_items: MaxItemsArgument,
        event_loop: Py<PyAny>,
        wake: Py<PyAny>,
    ) -> PyResult<Option<Vec<Py<PyAny>>>> {
        self.bell.hang(Sleeper { event_loop, wake });
        let take = self.consumer().take(max_items.0);
        match take {
            Take::Items(items) => Ok(Some(items)),
            Take::Waiting => Ok(None),
            Take::Ended => {
                Err(ErrorClass::QueueClosed
                    .error("the queue is closed and its last item was taken".to_owned()))
            }
        }
    }

    /// Forgets whom to wake.
    #[pyo3(name = "_stop_waiting")]
    fn stop_waiting(&self) {
        self.consumer().stop_waiting();
        self.bell.unhang();
    }

    /// Counts of what went through.
    fn statistics(&self) -> QueueStatistics {
        self.consumer().statistics().into()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for item in self.consumer().iter() {
            visit.call(item)?;
        }
        self.bell.traverse(&visit)
    }

    fn __clear__(&self) {
        let items = self.consumer().take(NonZeroUsize::MAX);
        drop(items);
        self.stop_waiting();
    }
}
