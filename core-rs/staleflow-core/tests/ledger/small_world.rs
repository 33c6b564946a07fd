//! Every reachable state of a few small ledgers, compared with the brute-force oracle.
//!
//! States that differ only by ids and by a shift of all versions decide alike, so the reachable states are
//! finitely many and all of them are visited.

use std::collections::{BTreeMap, BTreeSet};

use staleflow_core::ids::{Batch, GroupId, Version};
use staleflow_core::ledger::{Ledger, LedgerConfig, Refusal};

use crate::oracle;

const WORLDS: [(usize, u64); 6] = [(1, 0), (3, 0), (1, 3), (2, 1), (2, 2), (3, 1)];

/// A ledger with one member per group, and what a bystander noted about it.
#[derive(Clone)]
struct World {
    ledger: Ledger,
    batch_size: usize,
    max_staleness: u64,
    published: u64,
    running: BTreeMap<GroupId, u64>,
    complete: BTreeMap<GroupId, u64>,
    lease: Option<Lease>,
}

#[derive(Clone)]
struct Lease {
    held: bool,
    versions: Vec<u64>,
}

#[derive(Clone, Copy)]
enum Move {
    Admit(u64),
    Complete(GroupId, Option<u64>),
    Abort(GroupId),
    Consume,
    Publish,
    Release,
}

/// A state up to renaming of groups and shifting of versions.
type Shape = (u64, Vec<u64>, Vec<u64>, Option<(bool, Vec<u64>)>);

impl World {
    fn new(batch_size: usize, max_staleness: u64) -> Self {
        let config =
            LedgerConfig::new(i64::try_from(batch_size).unwrap(), i64::try_from(max_staleness).unwrap(), 1);
        Self {
            ledger: Ledger::new(config.unwrap()),
            batch_size,
            max_staleness,
            published: 0,
            running: BTreeMap::new(),
            complete: BTreeMap::new(),
            lease: None,
        }
    }

    fn next_batch(&self) -> u64 {
        self.published + u64::from(self.lease.as_ref().is_some_and(|lease| lease.held))
    }

    /// The first batch with places to give: a lease fills its own.
    fn first_batch(&self) -> u64 {
        self.published + u64::from(self.lease.is_some())
    }

    fn deadlines(&self, groups: &BTreeMap<GroupId, u64>) -> Vec<u64> {
        groups.values().map(|version| version + self.max_staleness).collect()
    }

    fn live_deadlines(&self) -> Vec<u64> {
        [self.deadlines(&self.running), self.deadlines(&self.complete)].concat()
    }

    /// Versions on both sides of everything admission distinguishes.
    fn engine_versions(&self) -> impl Iterator<Item = u64> + use<> {
        self.published.saturating_sub(self.max_staleness + 1)..=self.published + 1
    }

    fn shape(&self) -> Shape {
        let ages = |versions: &mut dyn Iterator<Item = &u64>| {
            let mut ages: Vec<u64> = versions.map(|version| self.published - version).collect();
            ages.sort_unstable();
            ages
        };
        let lease = self.lease.as_ref().map(|lease| (lease.held, ages(&mut lease.versions.iter())));
        let history = self.published.min(self.max_staleness + 1);
        (history, ages(&mut self.running.values()), ages(&mut self.complete.values()), lease)
    }

    fn moves(&self) -> Vec<Move> {
        let completions = self.running.iter().flat_map(|(group, version)| {
            let reported = (*version..=self.published).map(|oldest| Move::Complete(*group, Some(oldest)));
            reported.chain([Move::Complete(*group, None)])
        });
        let ends = self.running.keys().chain(self.complete.keys()).map(|group| Move::Abort(*group));
        let admissions = self.engine_versions().map(Move::Admit);
        let lease_moves = [Move::Consume, Move::Publish, Move::Release];
        completions.chain(ends).chain(admissions).chain(lease_moves).collect()
    }

    /// Makes the move if it is legal and granted.
    fn apply(&mut self, next: Move) {
        match next {
            Move::Admit(version) => {
                if let Ok(group) = self.ledger.admit(Version(version)) {
                    self.running.insert(group, version);
                }
            }
            Move::Complete(group, oldest) => {
                self.ledger.complete(group, oldest.map(Version)).unwrap();
                let version = self.running.remove(&group).unwrap();
                self.complete.insert(group, oldest.unwrap_or(version));
            }
            Move::Abort(group) => {
                self.ledger.abort(group, "moved").unwrap();
                self.running.remove(&group).or_else(|| self.complete.remove(&group)).unwrap();
            }
            Move::Consume => self.consume(),
            Move::Publish => {
                if self.ledger.publish(Version(self.published + 1)).is_ok() {
                    self.published += 1;
                    self.lease = None;
                }
            }
            Move::Release => {
                if self.ledger.release(Batch(self.published)).is_ok() {
                    self.lease.as_mut().unwrap().held = false;
                }
            }
        }
    }

    fn consume(&mut self) {
        if let Ok(lease) = self.ledger.consume() {
            let versions = match self.lease.take() {
                Some(released) => released.versions,
                None => lease.groups.iter().map(|group| self.complete.remove(group).unwrap()).collect(),
            };
            self.lease = Some(Lease { held: true, versions });
        }
    }
}

/// Calls `check` in every reachable state of every small world.
fn in_every_state(check: impl Fn(&World)) {
    for (batch_size, max_staleness) in WORLDS {
        let start = World::new(batch_size, max_staleness);
        let mut seen = BTreeSet::from([start.shape()]);
        let mut unexplored = vec![start];
        while let Some(world) = unexplored.pop() {
            check(&world);
            for next in world.moves() {
                let mut reached = world.clone();
                reached.apply(next);
                if seen.insert(reached.shape()) {
                    unexplored.push(reached);
                }
            }
        }
        assert!(seen.len() > 3 * (batch_size + 1), "only {} states", seen.len());
    }
}

#[test]
fn never_later_than_deadline() {
    in_every_state(|world| {
        assert!(oracle::placeable(&world.live_deadlines(), world.first_batch(), world.batch_size));
        for version in world.lease.iter().flat_map(|lease| &lease.versions) {
            assert!(version + world.max_staleness >= world.published);
        }
    });
}

#[test]
fn admits_iff_feasible() {
    in_every_state(|world| {
        for version in world.engine_versions() {
            let deadline = version + world.max_staleness;
            let mut live = world.live_deadlines();
            let mut room = 0;
            while version <= world.published && {
                live.push(deadline);
                oracle::placeable(&live, world.first_batch(), world.batch_size)
            } {
                room += 1;
            }
            assert_eq!(world.ledger.capacity(Version(version)), room);

            let refusal = world.ledger.clone().admit(Version(version)).err();
            match refusal {
                None => assert!(room > 0),
                Some(Refusal::FromFuture { .. }) => assert!(version > world.published),
                Some(Refusal::TooOld { .. }) => assert!(deadline < world.next_batch()),
                Some(Refusal::WindowFull { batch }) => {
                    assert_eq!(room, 0);
                    assert!(world.next_batch() <= deadline && deadline <= batch.0);
                }
                Some(Refusal::Draining | Refusal::Closed) => panic!("nothing drains or closes this ledger"),
            }
        }
    });
}

#[test]
fn ready_iff_feasible() {
    in_every_state(|world| {
        let (running, complete) = (world.deadlines(&world.running), world.deadlines(&world.complete));
        let feasible = match &world.lease {
            Some(lease) => !lease.held,
            None => oracle::ready(&complete, &running, world.published, world.batch_size),
        };
        assert_eq!(world.ledger.is_ready(), feasible);
        assert_eq!(world.ledger.clone().consume().is_ok(), feasible);

        let blockers = world.ledger.blockers();
        if world.lease.as_ref().is_some_and(|lease| !lease.held) {
            assert_eq!(blockers, []);
            return;
        }
        let first = world.next_batch();
        let fewest = oracle::fewest_blockers(&complete, &running, first, world.batch_size);
        assert_eq!(blockers.len(), fewest.unwrap_or(running.len()));
        if world.lease.is_none() && fewest.is_some() {
            let mut unblocked = world.ledger.clone();
            unblocked.complete_many(&blockers).unwrap();
            assert!(unblocked.is_ready());
        }
    });
}
