//! The side that puts.

use std::sync::atomic::Ordering;

use thiserror::Error;

use super::Shared;
use super::state::Refusal;
use super::sync::Arc;
use crate::ids::Batch;

/// Puts items, from any thread. Clones put into the same queue.
///
/// Dropping producers ends nothing: only [`Producer::close`] does.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
}

/// The item was not accepted; here it is.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PutError<T> {
    /// As many items are held as the queue may hold.
    #[error("the queue is full")]
    Full(T),
    /// The queue was closed, or its consumer is gone.
    #[error("the queue is closed")]
    Closed(T),
}

impl<T> Producer<T> {
    pub(super) fn new(shared: Arc<Shared<T>>) -> Self {
        Self { shared }
    }

    /// Puts an item that is due by `deadline`, and wakes the consumer if it waits. Never blocks.
    ///
    /// # Errors
    /// Full or closed; the item comes back.
    pub fn try_put(&self, deadline: Batch, item: T) -> Result<(), PutError<T>> {
        let shared = &*self.shared;
        match shared.state.reserve(shared.capacity) {
            Ok(()) => {}
            Err(Refusal::Full) => {
                shared.refused.fetch_add(1, Ordering::Relaxed);
                return Err(PutError::Full(item));
            }
            Err(Refusal::Closed) => return Err(PutError::Closed(item)),
        }
        shared.ingest.push((deadline, item));
        if shared.state.announce() {
            shared.wake();
        }
        Ok(())
    }

    /// Ends the queue: nothing is accepted from now on, and the consumer is told after the last item. May be called
    /// again.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Whether the queue was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.state.load().is_closed()
    }

    /// Places taken at this instant.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.shared.state.load().held()
    }

    /// The most items that the queue holds.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.shared.capacity.get()
    }
}

impl<T> Clone for Producer<T> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared))
    }
}
