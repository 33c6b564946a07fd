//! One thread: order, bound, giving back, waking, closing.

use staleflow_core::ids::Batch;
use staleflow_core::queue::{PutError, Statistics, Take};

use super::{queue, up_to};

#[test]
fn due_first_leaves_first_and_then_as_it_came() {
    let (producer, mut consumer, _bell) = queue(8);
    for (deadline, item) in [(3, 'a'), (1, 'b'), (2, 'c'), (1, 'd'), (3, 'e'), (1, 'f')] {
        producer.try_put(Batch(deadline), item).unwrap();
    }
    assert_eq!(consumer.take(up_to(4)), Take::Items(vec!['b', 'd', 'f', 'c']));
    producer.try_put(Batch(0), 'g').unwrap();
    assert_eq!(consumer.take(up_to(4)), Take::Items(vec!['g', 'a', 'e']));
    assert_eq!(consumer.take(up_to(4)), Take::Waiting);
}

#[test]
fn full_queue_gives_the_item_back_until_one_is_taken() {
    let (producer, mut consumer, _bell) = queue(2);
    producer.try_put(Batch(0), 'a').unwrap();
    producer.try_put(Batch(0), 'b').unwrap();
    assert_eq!(producer.try_put(Batch(0), 'c'), Err(PutError::Full('c')));
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec!['a']), "what waits in a level still counts");
    producer.try_put(Batch(0), 'c').unwrap();
    assert_eq!(producer.try_put(Batch(0), 'd'), Err(PutError::Full('d')));
    assert_eq!(consumer.statistics(), Statistics { taken: 1, held: 2, refused: 2, wakes: 0, high_water: 2 });
    assert_eq!(consumer.statistics().put(), 3);
}

#[test]
fn burst_wakes_once() {
    let (producer, mut consumer, bell) = queue(100);
    for burst in 1..=3 {
        assert_eq!(consumer.take(up_to(100)), Take::Waiting);
        for item in 0..100 {
            producer.try_put(Batch(0), item).unwrap();
        }
        assert_eq!(bell.rings(), burst);
        assert_eq!(consumer.take(up_to(100)), Take::Items((0..100).collect()));
    }
    assert_eq!(consumer.statistics().wakes, 3);
}

#[test]
fn nobody_is_woken_who_does_not_wait() {
    let (producer, mut consumer, bell) = queue(4);
    producer.try_put(Batch(0), 'a').unwrap();
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec!['a']));
    producer.try_put(Batch(0), 'b').unwrap();
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec!['b']));
    assert_eq!(consumer.take(up_to(1)), Take::Waiting);
    consumer.stop_waiting();
    producer.try_put(Batch(0), 'c').unwrap();
    assert_eq!(bell.rings(), 0);
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec!['c']));
}

#[test]
fn closed_queue_delivers_what_it_holds_and_then_ends() {
    let (producer, mut consumer, _bell) = queue(4);
    producer.try_put(Batch(1), 'a').unwrap();
    producer.try_put(Batch(0), 'b').unwrap();
    assert!(!producer.is_closed());
    producer.close();
    producer.close();
    assert!(producer.is_closed());
    assert_eq!(producer.try_put(Batch(0), 'c'), Err(PutError::Closed('c')));
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec!['b']));
    assert_eq!(consumer.take(up_to(9)), Take::Items(vec!['a']));
    assert_eq!(consumer.take(up_to(1)), Take::Ended);
    assert_eq!(consumer.take(up_to(1)), Take::Ended);
    assert_eq!(consumer.statistics().refused, 0, "only a full queue refuses");
}

#[test]
fn full_and_closed_queue_says_closed() {
    let (producer, _consumer, _bell) = queue(1);
    producer.try_put(Batch(0), 'a').unwrap();
    producer.close();
    assert_eq!(producer.try_put(Batch(0), 'b').unwrap_err().to_string(), "the queue is closed");
}

#[test]
fn closing_wakes_once() {
    let (producer, mut consumer, bell) = queue::<char>(1);
    assert_eq!(consumer.take(up_to(1)), Take::Waiting);
    producer.close();
    producer.close();
    assert_eq!(bell.rings(), 1);
    assert_eq!(consumer.take(up_to(1)), Take::Ended);
}

#[test]
fn producers_that_are_gone_end_nothing() {
    let (producer, mut consumer, bell) = queue::<char>(1);
    drop(producer);
    assert_eq!(consumer.take(up_to(1)), Take::Waiting);
    assert_eq!(bell.rings(), 0);
}

#[test]
fn dropped_consumer_closes_the_queue_and_drops_what_it_held() {
    let item = std::sync::Arc::new(());
    let (producer, mut consumer, bell) = queue(2);
    assert_eq!(consumer.take(up_to(1)), Take::Waiting);
    producer.try_put(Batch(0), item.clone()).unwrap();
    assert_eq!(consumer.take(up_to(1)), Take::Items(vec![item.clone()]));
    assert_eq!(consumer.take(up_to(1)), Take::Waiting);
    drop(consumer);
    assert_eq!(bell.rings(), 1, "nobody is left to be woken");
    assert_eq!(producer.try_put(Batch(0), item.clone()), Err(PutError::Closed(item.clone())));
    drop(producer);
    assert_eq!(std::sync::Arc::strong_count(&item), 1);
}
