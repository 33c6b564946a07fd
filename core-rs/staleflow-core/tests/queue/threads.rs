//! Eight real threads.

use std::collections::BTreeMap;
use std::thread;

use staleflow_core::ids::Batch;
use staleflow_core::queue::{Producer, PutError, Statistics};

use super::{next_batch, queue};

const THREADS: u64 = 8;
const ITEMS: u64 = 20_000;

/// Who put it, due when, and as which of its puts.
type Item = (u64, u64, u64);

/// A deadline that looks random and is the same in every run.
fn deadline(thread: u64, index: u64) -> u64 {
    (index * 2_654_435_761 + thread * 40_503) % 5
}

/// Puts all items of a thread; one that comes back is put again. Returns how many came back.
fn put_all(producer: &Producer<Item>, thread: u64) -> u64 {
    let mut refused = 0;
    for index in 0..ITEMS {
        let due = deadline(thread, index);
        let mut item = (thread, due, index);
        while let Err(PutError::Full(back)) = producer.try_put(Batch(due), item) {
            refused += 1;
            item = back;
            thread::yield_now();
        }
    }
    refused
}

/// Capacity, and the most to take at once.
fn stress(capacity: u32, max_items: usize) {
    let (producer, mut consumer, bell) = queue(capacity);
    let putting: Vec<_> = (0..THREADS)
        .map(|thread| {
            let producer = producer.clone();
            thread::spawn(move || put_all(&producer, thread))
        })
        .collect();
    let closing = thread::spawn(move || {
        let refused: u64 = putting.into_iter().map(|thread| thread.join().unwrap()).sum();
        producer.close();
        refused
    });

    let mut latest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    let mut taken = 0;
    loop {
        let batch = next_batch(&mut consumer, &bell, max_items);
        if batch.is_empty() {
            break;
        }
        assert!(batch.is_sorted_by_key(|(_, due, _)| *due));
        for (thread, due, index) in batch {
            let before = latest.insert((thread, due), index);
            assert!(
                before.is_none_or(|before| before < index),
                "one thread's items of one deadline keep order"
            );
            taken += 1;
        }
    }
    let Statistics { taken: counted, held, refused, wakes, high_water } = consumer.statistics();
    assert_eq!((taken, counted, held), (THREADS * ITEMS, THREADS * ITEMS, 0));
    assert_eq!(refused, closing.join().unwrap());
    assert_eq!(wakes, bell.rings());
    assert!(high_water <= u64::from(capacity));
}

#[test]
fn eight_threads_lose_nothing_in_a_roomy_queue() {
    stress(1 << 20, 256);
}

#[test]
fn eight_threads_lose_nothing_in_a_tight_queue() {
    stress(3, 2);
}

#[test]
fn bound_is_exact_whoever_puts() {
    let (producer, mut consumer, bell) = queue(1000);
    let accepted: u64 = thread::scope(|scope| {
        let putting: Vec<_> = (0..THREADS)
            .map(|thread| {
                let producer = producer.clone();
                let put = move |index| producer.try_put(Batch(0), (thread, index)).is_ok();
                scope.spawn(move || (0..1000).filter(|index| put(*index)).count() as u64)
            })
            .collect();
        putting.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(accepted, 1000);
    assert_eq!(consumer.statistics().refused, THREADS * 1000 - 1000);
    assert_eq!(next_batch(&mut consumer, &bell, 2000).len(), 1000);
}

/// Each item is put only after the one before was taken, so that nearly every put meets a consumer about to sleep.
#[test]
fn lone_items_always_arrive() {
    let (producer, mut consumer, bell) = queue(1);
    let putting: Vec<_> = (0..THREADS)
        .map(|thread| {
            let producer = producer.clone();
            thread::spawn(move || {
                for index in 0..500 {
                    while producer.try_put(Batch(0), (thread, index)).is_err() {
                        thread::yield_now();
                    }
                }
            })
        })
        .collect();
    for _ in 0..THREADS * 500 {
        assert_eq!(next_batch(&mut consumer, &bell, 1).len(), 1);
    }
    for thread in putting {
        thread.join().unwrap();
    }
}
