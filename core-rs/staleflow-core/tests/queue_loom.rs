//! Every interleaving of small worlds of producers, consumer and closing. Run with `RUSTFLAGS="--cfg loom"`.
//!
//! A lost wake-up is a deadlock here, and loom reports it.
#![cfg(loom)]

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::task::{Wake, Waker};

use loom::model::Builder;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use staleflow_core::ids::Batch;
use staleflow_core::queue::{Consumer, Producer, PutError, Take, bounded};

/// Counts how often it was rung, and lets the consumer sleep until then.
struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Bell {
    /// Sleeps until the bell has been rung more often than this; returns how often.
    fn sleep_beyond(&self, heard: u64) -> u64 {
        let mut rings = self.rings.lock().unwrap();
        while *rings <= heard {
            rings = self.rung.wait(rings).unwrap();
        }
        *rings
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rings.lock().unwrap() += 1;
        self.rung.notify_one();
    }
}

/// Switches between threads at most this often where none of them has to wait. Few faults need more than two.
const PREEMPTIONS: usize = 3;

fn explore(world: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(world);
}

fn queue(capacity: u32) -> (Producer<u32>, Consumer<u32>, Arc<Bell>) {
    let bell = Arc::new(Bell { rings: Mutex::new(0), rung: Condvar::new() });
    let (producer, consumer) = bounded(NonZeroU32::new(capacity).unwrap(), Waker::from(Arc::clone(&bell)));
    (producer, consumer, bell)
}

/// Takes one by one until `wanted` items are there or the queue has ended; returns them and the number of waits.
fn take_until(consumer: &mut Consumer<u32>, bell: &Bell, wanted: usize) -> (Vec<u32>, u64) {
    let mut items = Vec::new();
    let mut waits = 0;
    let mut heard = 0;
    while items.len() < wanted {
        match consumer.take(NonZeroUsize::MIN) {
            Take::Items(taken) => items.extend(taken),
            Take::Waiting => {
                waits += 1;
                heard = bell.sleep_beyond(heard);
            }
            Take::Ended => break,
        }
    }
    (items, waits)
}

/// Every wait of the consumer ends by a wake, and no other wake is sent but for a wait that found news by itself.
#[test]
fn one_producer_no_wake_up_is_lost() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(2);
        let putting = thread::spawn(move || {
            producer.try_put(Batch(0), 1).unwrap();
            producer.try_put(Batch(0), 2).unwrap();
        });
        let (items, waits) = take_until(&mut consumer, &bell, 2);
        assert_eq!(items, [1, 2]);
        putting.join().unwrap();
        assert!(
            consumer.statistics().wakes <= waits + 2,
            "one for each wait, and one for each that found news"
        );
    });
}

#[test]
fn two_producers_no_item_is_lost() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(2);
        let putting = [1, 2].map(|item| {
            let producer = producer.clone();
            thread::spawn(move || producer.try_put(Batch(0), item).unwrap())
        });
        let (mut items, _) = take_until(&mut consumer, &bell, 2);
        items.sort_unstable();
        assert_eq!(items, [1, 2]);
        for thread in putting {
            thread.join().unwrap();
        }
    });
}

#[test]
fn two_producers_wake_once_per_wait() {
    explore(|| {
        let (producer, mut consumer, _bell) = queue(2);
        assert_eq!(consumer.take(NonZeroUsize::MIN), Take::Waiting);
        let putting = [1, 2].map(|item| {
            let producer = producer.clone();
            thread::spawn(move || producer.try_put(Batch(0), item).unwrap())
        });
        for thread in putting {
            thread.join().unwrap();
        }
        assert_eq!(consumer.statistics().wakes, 1);
    });
}

#[test]
fn closing_wakes_and_ends_after_the_last_item() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(1);
        let putting = thread::spawn(move || {
            producer.try_put(Batch(0), 1).unwrap();
            producer.close();
        });
        assert_eq!(take_until(&mut consumer, &bell, usize::MAX).0, [1]);
        putting.join().unwrap();
        assert_eq!(consumer.take(NonZeroUsize::MIN), Take::Ended);
    });
}

/// A put that races with closing is either given back or delivered before the end.
#[test]
fn closing_races_with_a_put() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(1);
        let closer = producer.clone();
        let putting = thread::spawn(move || producer.try_put(Batch(0), 1));
        let closing = thread::spawn(move || closer.close());
        let items = take_until(&mut consumer, &bell, usize::MAX).0;
        match putting.join().unwrap() {
            Ok(()) => assert_eq!(items, [1]),
            Err(error) => {
                assert_eq!(error, PutError::Closed(1));
                assert!(items.is_empty());
            }
        }
        closing.join().unwrap();
    });
}

/// Taking a registration back, as a cancelled consumer does, hides no news from the next wait.
#[test]
fn cancelled_wait_loses_nothing() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(1);
        let putting = thread::spawn(move || producer.try_put(Batch(0), 1).unwrap());
        let mut items = Vec::new();
        if let Take::Items(taken) = consumer.take(NonZeroUsize::MIN) {
            items = taken;
        }
        consumer.stop_waiting();
        if items.is_empty() {
            items = take_until(&mut consumer, &bell, 1).0;
        }
        assert_eq!(items, [1]);
        putting.join().unwrap();
    });
}

#[test]
fn bound_is_exact() {
    explore(|| {
        let (producer, mut consumer, bell) = queue(1);
        let putting = [1, 2].map(|item| {
            let producer = producer.clone();
            thread::spawn(move || producer.try_put(Batch(0), item).is_ok())
        });
        let accepted = putting.map(|thread| thread.join().unwrap());
        assert_eq!(accepted.iter().filter(|accepted| **accepted).count(), 1, "nothing is taken meanwhile");
        assert_eq!(take_until(&mut consumer, &bell, 1).0.len(), 1);
        let statistics = consumer.statistics();
        assert_eq!((statistics.put(), statistics.refused, statistics.high_water), (1, 1, 1));
    });
}

#[test]
fn dropped_consumer_leaves_producers_unharmed() {
    explore(|| {
        let (producer, mut consumer, _bell) = queue(1);
        assert_eq!(consumer.take(NonZeroUsize::MIN), Take::Waiting);
        let leaving = thread::spawn(move || drop(consumer));
        let outcome = producer.try_put(Batch(0), 1);
        assert!(matches!(outcome, Ok(()) | Err(PutError::Closed(1))));
        leaving.join().unwrap();
        assert_eq!(producer.try_put(Batch(0), 2), Err(PutError::Closed(2)));
    });
}
