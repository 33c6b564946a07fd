//! The trajectory queue: many producers, one consumer, and what is due first leaves first.
//!
//! ```text
//! try_put --reserve--> [held < capacity?] --push--> ingest --sort--> levels, by deadline --take--> consumer
//!                                          |                                                          |
//!                                          +---- announce: wakes a consumer that waits ---------------+
//! ```
//!
//! Producers meet in a lock-free queue, the *ingest*. The consumer alone empties it into *levels*, one for every
//! deadline, and takes from the first. It knows deadlines and counts. It refuses to know what an item is, what time
//! it is, and how a consumer sleeps: that is the [`Waker`]'s business.
//!
//! **Invariant.** An item that was accepted is in the ingest or in the levels until the consumer takes it, in order
//! of deadline and, within one, of arrival. Never more than `capacity` are held. And nobody sleeps beside work: while
//! the consumer is registered as waiting, whatever it could take or learn has yet to be announced, and the first
//! announcement wakes it, once.
//!
//! **The end is a message.** A queue ends when somebody closes it, never because it is empty or its producers are
//! gone. What was accepted before is still delivered; then, and only then, the consumer is told.

mod consumer;
mod levels;
mod producer;
mod state;
mod statistics;
mod sync;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

pub use self::consumer::{Consumer, Take};
pub use self::producer::{Producer, PutError};
pub use self::statistics::Statistics;

use self::state::State;
use self::sync::{Arc, Ingest};
use crate::ids::Batch;

/// An empty queue that holds at most `capacity` items. `waker` is called for a consumer that waits, on the thread of
/// whoever brings the first news.
#[must_use]
pub fn bounded<T>(capacity: NonZeroU32, waker: Waker) -> (Producer<T>, Consumer<T>) {
    let shared = Arc::new(Shared {
        capacity,
        state: State::new(),
        ingest: Ingest::new(),
        waker,
        refused: AtomicU64::new(0),
        wakes: AtomicU64::new(0),
    });
    (Producer::new(Arc::clone(&shared)), Consumer::new(shared))
}

/// What producers and the consumer share.
struct Shared<T> {
    capacity: NonZeroU32,
    state: State,
    ingest: Ingest<(Batch, T)>,
    waker: Waker,
    /// For [`Statistics`], like the next: nothing is decided by them, and the models need not see them.
    refused: AtomicU64,
    wakes: AtomicU64,
}

impl<T> Shared<T> {
    fn close(&self) {
        if self.state.close() {
            self.wake();
        }
    }

    fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.waker.wake_by_ref();
    }
}
