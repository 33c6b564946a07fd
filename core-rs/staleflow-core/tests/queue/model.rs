//! Random calls, against a sorted list.

use proptest::prelude::*;
use staleflow_core::ids::Batch;
use staleflow_core::queue::{PutError, Take};

use super::{queue, up_to};

#[derive(Debug, Clone)]
enum Call {
    Put { deadline: u64 },
    Take { max_items: usize },
    StopWaiting,
    Close,
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        12 => (0_u64..4).prop_map(|deadline| Call::Put { deadline }),
        6 => (1_usize..6).prop_map(|max_items| Call::Take { max_items }),
        1 => Just(Call::StopWaiting),
        1 => Just(Call::Close),
    ]
}

/// What the queue should be: items with their deadlines, in the order in which they leave.
#[derive(Default)]
struct Model {
    items: Vec<(u64, usize)>,
    closed: bool,
    waiting: bool,
    wakes: u64,
    put: u64,
    refused: u64,
    high_water: u64,
}

impl Model {
    fn announce(&mut self) {
        self.wakes += u64::from(std::mem::take(&mut self.waiting));
    }

    fn put(&mut self, capacity: usize, deadline: u64, item: usize) -> Result<(), PutError<usize>> {
        if self.closed {
            return Err(PutError::Closed(item));
        }
        if self.items.len() == capacity {
            self.refused += 1;
            return Err(PutError::Full(item));
        }
        self.items.push((deadline, item));
        self.items.sort_by_key(|(deadline, _)| *deadline);
        self.put += 1;
        self.high_water = self.high_water.max(self.items.len() as u64);
        self.announce();
        Ok(())
    }

    fn take(&mut self, max_items: usize) -> Take<usize> {
        if !self.items.is_empty() {
            let rest = self.items.split_off(max_items.min(self.items.len()));
            let taken = std::mem::replace(&mut self.items, rest);
            return Take::Items(taken.into_iter().map(|(_, item)| item).collect());
        }
        self.waiting = !self.closed;
        if self.closed { Take::Ended } else { Take::Waiting }
    }
}

proptest! {
    #[test]
    fn queue_is_a_sorted_list(
        capacity in 1_u32..12,
        calls in prop::collection::vec(call(), 0..80),
    ) {
        let (producer, mut consumer, bell) = queue(capacity);
        let mut model = Model::default();
        for (item, call) in calls.into_iter().enumerate() {
            match call {
                Call::Put { deadline } => prop_assert_eq!(
                    producer.try_put(Batch(deadline), item),
                    model.put(capacity as usize, deadline, item)
                ),
                Call::Take { max_items } => {
                    prop_assert_eq!(consumer.take(up_to(max_items)), model.take(max_items));
                }
                Call::StopWaiting => {
                    consumer.stop_waiting();
                    model.waiting = false;
                }
                Call::Close => {
                    producer.close();
                    model.closed = true;
                    model.announce();
                }
            }
            let statistics = consumer.statistics();
            prop_assert_eq!(statistics.held, model.items.len() as u64);
            prop_assert_eq!(statistics.put(), model.put);
            prop_assert_eq!(statistics.refused, model.refused);
            prop_assert_eq!(statistics.high_water, model.high_water);
            prop_assert_eq!(statistics.wakes, model.wakes);
            prop_assert_eq!(bell.rings(), model.wakes);
        }
        let mut held: Vec<_> = consumer.iter().copied().collect();
        held.sort_unstable();
        let mut expected: Vec<_> = model.items.iter().map(|(_, item)| *item).collect();
        expected.sort_unstable();
        prop_assert_eq!(held, expected);
    }
}
