//! The side that takes.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;

use super::Shared;
use super::levels::Levels;
use super::statistics::Statistics;
use super::sync::Arc;

/// Takes what is due first. There is one of it. Dropping it closes the queue.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    levels: Levels<T>,
    taken: u64,
    /// The most places taken at any instant before the last release.
    high_water: u64,
}

/// What [`Consumer::take`] comes back with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Take<T> {
    /// At least one item, those due first, in order.
    Items(Vec<T>),
    /// There is nothing yet. The consumer is registered: the waker will be called once, when there is news.
    Waiting,
    /// The queue was closed and the last item has been taken.
    Ended,
}

impl<T> Consumer<T> {
    pub(super) fn new(shared: Arc<Shared<T>>) -> Self {
        Self { shared, levels: Levels::new(), taken: 0, high_water: 0 }
    }

    /// Takes up to `max_items`, or registers for a wake if there are none.
    pub fn take(&mut self, max_items: NonZeroUsize) -> Take<T> {
        self.sort();
        if !self.levels.is_empty() {
            return Take::Items(self.leave(max_items));
        }
        let seen = self.shared.state.wait();
        if seen.held() == 0 {
            // Whatever comes after this instant will find the registration.
            if seen.is_closed() {
                self.shared.state.stop_waiting();
                return Take::Ended;
            }
            return Take::Waiting;
        }
        self.sort();
        if self.levels.is_empty() {
            // A producer holds a place and has yet to push.
            return Take::Waiting;
        }
        self.shared.state.stop_waiting();
        Take::Items(self.leave(max_items))
    }

    /// Takes the registration of a [`Take::Waiting`] back. A wake that is on its way still comes.
    pub fn stop_waiting(&mut self) {
        self.shared.state.stop_waiting();
    }

    /// Every item held, in no order. Items still being put by another thread may be missing.
    pub fn iter(&mut self) -> impl Iterator<Item = &T> {
        self.sort();
        self.levels.iter()
    }

    /// Counts of what went through, at this instant.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let held = self.shared.state.load().held();
        Statistics {
            taken: self.taken,
            held,
            refused: self.shared.refused.load(Ordering::Relaxed),
            wakes: self.shared.wakes.load(Ordering::Relaxed),
            high_water: self.high_water.max(held),
        }
    }

    /// Empties the ingest into the levels. Ends, because no more than the capacity can arrive before places are
    /// given back.
    fn sort(&mut self) {
        while let Some((deadline, item)) = self.shared.ingest.pop() {
            self.levels.push(deadline, item);
        }
    }

    fn leave(&mut self, max_items: NonZeroUsize) -> Vec<T> {
        let items = self.levels.pop(max_items.get());
        let before = self.shared.state.release(items.len());
        // The number of places taken falls nowhere else, so its peaks are all seen here.
        self.high_water = self.high_water.max(before.held());
        self.taken += items.len() as u64;
        items
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.stop_waiting();
        self.shared.close();
    }
}
