//! The guarantees of the trajectory queue, one test each.
#![cfg(not(loom))]

mod contract;
mod model;
mod threads;

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};

use staleflow_core::queue::{Consumer, Producer, Take, bounded};

/// Wakes the thread that made it, and counts how often.
struct Bell {
    sleeper: Thread,
    rings: AtomicU64,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        self.sleeper.unpark();
    }
}

impl Bell {
    fn rings(&self) -> u64 {
        self.rings.load(Ordering::SeqCst)
    }
}

/// A queue whose consumer is the calling thread.
fn queue<T>(capacity: u32) -> (Producer<T>, Consumer<T>, Arc<Bell>) {
    let bell = Arc::new(Bell { sleeper: thread::current(), rings: AtomicU64::new(0) });
    let (producer, consumer) = bounded(NonZeroU32::new(capacity).unwrap(), Waker::from(Arc::clone(&bell)));
    (producer, consumer, bell)
}

fn up_to(items: usize) -> NonZeroUsize {
    NonZeroUsize::new(items).unwrap()
}

/// The next batch, slept for; empty once the queue has ended.
fn next_batch<T>(consumer: &mut Consumer<T>, bell: &Bell, max_items: usize) -> Vec<T> {
    loop {
        let heard = bell.rings();
        match consumer.take(up_to(max_items)) {
            Take::Items(items) => return items,
            Take::Ended => return Vec::new(),
            Take::Waiting => {
                // Parking may return early; a wake that is lost is a test that never ends.
                while bell.rings() == heard {
                    thread::park();
                }
            }
        }
    }
}
