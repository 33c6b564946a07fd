//! The one word on which producers and the consumer agree.

use std::num::NonZeroU32;

use super::sync::{AtomicU64, Ordering};

/// The consumer sleeps, or is about to; whoever clears the bit must wake it.
const WAITING: u64 = 1;
/// No item is accepted any more. Never cleared.
const CLOSED: u64 = 1 << 1;
/// One place taken. The bits from here on count the places.
const PLACE: u64 = 1 << 2;

/// Places taken, closed or not, waiting or not.
///
/// **Why no wake-up is lost.** A producer pushes its item and then clears `WAITING`; the consumer sets `WAITING` and
/// then looks once more. Both are read-modify-writes of this word, so one of them comes first. If it is the
/// consumer's, the producer finds the bit and wakes. If it is the producer's, the consumer's acquires what the
/// producer's released, and the second look finds the item. Closing is an announcement like any other.
pub(super) struct State(AtomicU64);

/// A value that the word had.
#[derive(Clone, Copy)]
pub(super) struct Seen(u64);

/// Why no place was reserved.
pub(super) enum Refusal {
    Full,
    Closed,
}

impl State {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn load(&self) -> Seen {
        Seen(self.0.load(Ordering::Relaxed))
    }

    /// Takes a place. Orders nothing: the push that follows is published by [`State::announce`].
    pub(super) fn reserve(&self, capacity: NonZeroU32) -> Result<(), Refusal> {
        let mut seen = self.load();
        loop {
            if seen.is_closed() {
                return Err(Refusal::Closed);
            }
            if seen.held() >= u64::from(capacity.get()) {
                return Err(Refusal::Full);
            }
            let taken = seen.0 + PLACE;
            match self.0.compare_exchange_weak(seen.0, taken, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(found) => seen = Seen(found),
            }
        }
    }

    /// Makes a pushed item known. True if the caller must wake the consumer.
    pub(super) fn announce(&self) -> bool {
        Seen(self.0.fetch_and(!WAITING, Ordering::AcqRel)).is_waiting()
    }

    /// Accepts nothing from now on. True if the caller must wake the consumer.
    pub(super) fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::Relaxed);
        self.announce()
    }

    /// Registers the consumer as waiting. It must look once more before it sleeps.
    pub(super) fn wait(&self) -> Seen {
        Seen(self.0.fetch_or(WAITING, Ordering::AcqRel))
    }

    /// Takes the registration back. A wake may be on its way all the same.
    pub(super) fn stop_waiting(&self) {
        self.0.fetch_and(!WAITING, Ordering::Relaxed);
    }

    /// Gives places back; returns what was before.
    pub(super) fn release(&self, places: usize) -> Seen {
        Seen(self.0.fetch_sub(places as u64 * PLACE, Ordering::Relaxed))
    }
}

impl Seen {
    /// Places taken, by items and by producers about to push one.
    pub(super) fn held(self) -> u64 {
        self.0 / PLACE
    }

    pub(super) fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    fn is_waiting(self) -> bool {
        self.0 & WAITING != 0
    }
}
