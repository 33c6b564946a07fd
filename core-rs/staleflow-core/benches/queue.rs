//! Nanoseconds per item through the trajectory queue, beside a locked `VecDeque` that knows no deadlines.
#![expect(missing_docs, reason = "criterion's macros write functions")]

use std::collections::VecDeque;
use std::hint::black_box;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use staleflow_core::ids::Batch;
use staleflow_core::queue::{Take, bounded};

/// Of all producers together. Starting the threads takes a share of well below a nanosecond of each.
const ITEMS: u64 = 240_000;
const MAX_ITEMS: NonZeroUsize = NonZeroUsize::new(256).unwrap();
const CAPACITY: NonZeroU32 = NonZeroU32::new(1 << 20).unwrap();
const DEADLINES: u64 = 5;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn trajectory_queue(producers: u64) {
    let (producer, mut consumer) = bounded(CAPACITY, Waker::from(Arc::new(Unpark(thread::current()))));
    thread::scope(|scope| {
        for _ in 0..producers {
            let producer = producer.clone();
            scope.spawn(move || {
                for item in 0..ITEMS / producers {
                    producer.try_put(Batch(item % DEADLINES), item).unwrap();
                }
            });
        }
        let mut taken = 0;
        while taken < ITEMS {
            match consumer.take(MAX_ITEMS) {
                Take::Items(items) => taken += black_box(items).len() as u64,
                Take::Waiting => thread::park(),
                Take::Ended => unreachable!("nobody closes it"),
            }
        }
    });
}

fn locked_deque(producers: u64) {
    let queue = Mutex::new(VecDeque::new());
    let filled = Condvar::new();
    thread::scope(|scope| {
        for _ in 0..producers {
            scope.spawn(|| {
                for item in 0..ITEMS / producers {
                    queue.lock().unwrap().push_back(item);
                    filled.notify_one();
                }
            });
        }
        let mut taken = 0;
        while taken < ITEMS {
            let mut items = filled.wait_while(queue.lock().unwrap(), |items| items.is_empty()).unwrap();
            let share = items.len().min(MAX_ITEMS.get());
            let batch: Vec<u64> = items.drain(..share).collect();
            drop(items);
            taken += black_box(batch).len() as u64;
        }
    });
}

fn queues(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    group.throughput(Throughput::Elements(ITEMS)).sample_size(20);
    for producers in [1, 4, 8] {
        group.bench_function(BenchmarkId::new("trajectory_queue", producers), |bencher| {
            bencher.iter(|| trajectory_queue(producers));
        });
        group.bench_function(BenchmarkId::new("locked_deque", producers), |bencher| {
            bencher.iter(|| locked_deque(producers));
        });
    }
    group.finish();
}

criterion_group!(benches, queues);
criterion_main!(benches);
