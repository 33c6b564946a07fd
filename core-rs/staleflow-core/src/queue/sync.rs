//! The parts that threads meet in: real ones, or under `--cfg loom` ones whose every interleaving is tried.

#[cfg(not(loom))]
pub(super) use std::sync::Arc;
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
pub(super) use crossbeam_queue::SegQueue as Ingest;

#[cfg(loom)]
pub(super) use loom::sync::Arc;
#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
pub(super) use self::model::Ingest;

#[cfg(loom)]
mod model {
    use std::sync::atomic::AtomicUsize;

    use loom::sync::Mutex;
    use loom::sync::atomic::{AtomicBool, Ordering};

    /// As many pushes as a model may make.
    const SLOTS: usize = 4;

    /// A queue that promises no more than a lock-free one must: a push is sure to be seen only by who is ordered
    /// after it by other means. So the models prove that the queue's own protocol gives that order.
    pub(crate) struct Ingest<T> {
        slots: [Slot<T>; SLOTS],
        tail: AtomicUsize,
        head: AtomicUsize,
    }

    struct Slot<T> {
        written: AtomicBool,
        item: Mutex<Option<T>>,
    }

    impl<T> Ingest<T> {
        pub(crate) fn new() -> Self {
            let slot = || Slot { written: AtomicBool::new(false), item: Mutex::new(None) };
            Self {
                slots: std::array::from_fn(|_| slot()),
                tail: AtomicUsize::new(0),
                head: AtomicUsize::new(0),
            }
        }

        pub(crate) fn push(&self, item: T) {
            let slot = &self.slots[self.tail.fetch_add(1, Ordering::Relaxed)];
            *slot.item.lock().unwrap() = Some(item);
            slot.written.store(true, Ordering::Relaxed);
        }

        /// For one consumer only.
        pub(crate) fn pop(&self) -> Option<T> {
            let head = self.head.load(Ordering::Relaxed);
            let slot = self.slots.get(head)?;
            if !slot.written.load(Ordering::Relaxed) {
                return None;
            }
            self.head.store(head + 1, Ordering::Relaxed);
            slot.item.lock().unwrap().take()
        }
    }
}
