//! What a live group costs in memory: bytes that the ledger has asked the allocator for and not given back, per live
//! group, in a ledger that is full, in motion, and all of whose groups are complete, which is when each costs most.
//! Prints one JSON object per cell and group size.

mod world;

use staleflow_core::ids::GroupId;

use self::world::{Cell, World};

fn main() {
    for cell in Cell::grid().into_iter().filter(|cell| cell.is_full()) {
        for group_size in [1, 8] {
            let mut world = None;
            let allocated = allocation_counter::measure(|| {
                let world = world.insert(World::new(cell, group_size));
                let admitted: Vec<GroupId> =
                    world.ledger.admit_many(world.ledger.published(), cell.batch_size);
                assert_eq!(admitted.len() as u64, cell.batch_size);
                let running: Vec<GroupId> =
                    (world.oldest..=admitted[admitted.len() - 1].0).map(GroupId).collect();
                world.ledger.complete_many(&running).unwrap();
            });
            let live = cell.live + cell.batch_size;
            println!(
                r#"{{"batch_size": {}, "max_staleness": {}, "live": {live}, "group_size": {group_size}, "bytes": {}}}"#,
                cell.batch_size, cell.max_staleness, allocated.bytes_current,
            );
        }
    }
}
