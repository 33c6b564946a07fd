//! A ledger in motion: groups run in the background while every turn takes one whole batch through its life.

use std::fmt;

use staleflow_core::ids::{GroupId, Version};
use staleflow_core::ledger::{Ledger, LedgerConfig};

/// One configuration that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Groups per train step.
    pub(crate) batch_size: u64,
    /// The staleness bound.
    pub(crate) max_staleness: u64,
    /// Groups that run in the background, beside the batch that a turn takes through its life.
    pub(crate) live: u64,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "B={} eta={} live={}", self.batch_size, self.max_staleness, self.live)
    }
}

impl Cell {
    /// Every lawful cell: a group that waits behind `live` others is trained `live / batch_size` versions after its
    /// own, so `live <= max_staleness * batch_size`. `live` at that limit is a cell too: all places are taken then,
    /// and every deadline has its groups. The last batch size is there because 100,000 fit into no smaller one.
    pub(crate) fn grid() -> Vec<Self> {
        const SIZES: [(u64, &[u64]); 4] =
            [(64, &[0, 1, 4, 16]), (512, &[0, 1, 4, 16]), (4096, &[0, 1, 4, 16]), (8192, &[16])];
        let mut cells = Vec::new();
        for (batch_size, bounds) in SIZES {
            for &max_staleness in bounds {
                let limit = max_staleness * batch_size;
                let mut lives: Vec<u64> =
                    [0, 1_000, 100_000].into_iter().filter(|live| *live < limit).collect();
                lives.push(limit);
                cells.extend(lives.into_iter().map(|live| Self { batch_size, max_staleness, live }));
            }
        }
        cells
    }

    /// Whether the turn's batch takes the last places.
    pub(crate) fn is_full(self) -> bool {
        self.live == self.max_staleness * self.batch_size
    }
}

/// A ledger whose groups `oldest..` are live, in admission order.
pub(crate) struct World {
    pub(crate) ledger: Ledger,
    pub(crate) cell: Cell,
    pub(crate) oldest: u64,
}

impl World {
    /// In the middle of a run: as many turns have passed as there are deadlines, so they are spread.
    pub(crate) fn new(cell: Cell, group_size: u32) -> Self {
        let signed = |size: u64| i64::try_from(size).expect("sizes are small");
        let config =
            LedgerConfig::new(signed(cell.batch_size), signed(cell.max_staleness), group_size.into())
                .unwrap();
        let mut ledger = Ledger::new(config);
        assert_eq!(ledger.admit_many(Version(0), cell.live).len() as u64, cell.live);
        let mut world = Self { ledger, cell, oldest: 1 };
        for _ in 0..=cell.max_staleness {
            world.ledger.admit_many(world.ledger.published(), cell.batch_size);
            let due = world.take_due();
            world.ledger.complete_many(&due).unwrap();
            world.ledger.consume().unwrap();
            world.ledger.publish(world.ledger.published().next()).unwrap();
        }
        world
    }

    /// The batch that was admitted first, which the turn completes.
    pub(crate) fn take_due(&mut self) -> Vec<GroupId> {
        let first = self.oldest;
        self.oldest += self.cell.batch_size;
        (first..self.oldest).map(GroupId).collect()
    }
}
