//! Live groups ordered by deadline, and the two questions the law answers about them.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use crate::ids::{Batch, GroupId};

/// The groups that still need a place in a batch.
///
/// **Capacity law.** For every batch `b >= first_batch`, at most `(b - first_batch + 1) * batch_size` groups have
/// a deadline of `b` or earlier. This is Hall's condition for unit jobs with deadlines: it holds exactly if all
/// groups can be placed without one being late.
///
/// Only deadlines that some group has are stored. Between two of them the left side is constant and the right
/// side grows, so checking the stored ones checks every batch. There are at most `max_staleness + 1`.
#[derive(Debug, Clone)]
pub(super) struct Window {
    batch_size: u64,
    first_batch: Batch,
    by_deadline: BTreeMap<Batch, Due>,
}

/// The groups of one deadline, in admission order.
#[derive(Debug, Clone, Default)]
struct Due {
    running: BTreeSet<GroupId>,
    complete: BTreeSet<GroupId>,
}

impl Due {
    fn count(&self) -> u64 {
        (self.running.len() + self.complete.len()) as u64
    }
}

impl Window {
    /// No groups; the first batch to fill is `first_batch`.
    pub(super) fn new(batch_size: u64, first_batch: Batch) -> Self {
        Self { batch_size, first_batch, by_deadline: BTreeMap::new() }
    }

    /// How many more groups of this deadline the law allows.
    pub(super) fn vacancies(&self, deadline: Batch) -> u64 {
        self.slack_from(deadline).map(|(_, free)| free).min().unwrap_or(0)
    }

    /// The first batch up to which no place is left for a group of this deadline.
    pub(super) fn first_full(&self, deadline: Batch) -> Option<Batch> {
        self.slack_from(deadline).find(|(_, free)| *free == 0).map(|(batch, _)| batch)
    }

    /// The free places up to `deadline`, then up to each later stored deadline: all the counts in which one
    /// more group would appear.
    fn slack_from(&self, deadline: Batch) -> impl Iterator<Item = (Batch, u64)> {
        let due: u64 = self.by_deadline.range(..=deadline).map(|(_, due)| due.count()).sum();
        let later = self.by_deadline.range(deadline.next()..).scan(due, |total, (batch, due)| {
            *total += due.count();
            Some((*batch, *total))
        });
        iter::once((deadline, due))
            .chain(later)
            .map(|(batch, due)| (batch, self.places_before(batch.next()).saturating_sub(due)))
    }

    /// Places in the batches from the first one up to, not including, `batch`.
    fn places_before(&self, batch: Batch) -> u64 {
        batch.0.saturating_sub(self.first_batch.0).saturating_mul(self.batch_size)
    }

    /// How many running groups must finish before the first batch can be filled; 0 means it can be filled now.
    ///
    /// Filling it takes `batch_size` complete groups whose removal leaves the law true from the next batch on.
    /// With the earliest deadlines taken first, `max(R(b), C(b) - batch_size)` groups due by `b` remain, where
    /// `R` counts running and `C` all groups. The law now bounds the second term, so only `R(b)` can stand in
    /// the way.
    pub(super) fn shortfall(&self) -> u64 {
        let complete: u64 = self.by_deadline.values().map(|due| due.complete.len() as u64).sum();
        let mut running = 0;
        let mut shortfall = self.batch_size.saturating_sub(complete);
        for (batch, due) in &self.by_deadline {
            running += due.running.len() as u64;
            shortfall = shortfall.max(running.saturating_sub(self.places_before(*batch)));
        }
        shortfall
    }

    /// The fewest running groups whose completion lets the first batch be filled: those due first. Fewer than
    /// the shortfall if not enough groups are running.
    pub(super) fn blockers(&self) -> Vec<GroupId> {
        let wanted = usize::try_from(self.shortfall()).unwrap_or(usize::MAX);
        self.by_deadline.values().flat_map(|due| &due.running).take(wanted).copied().collect()
    }

    /// Fills the first batch with the complete groups due first, in admission order among equals, and moves on
    /// to the next batch. Call only while [`Window::shortfall`] is 0.
    pub(super) fn take_batch(&mut self) -> Vec<GroupId> {
        let mut taken = Vec::new();
        for due in self.by_deadline.values_mut() {
            while (taken.len() as u64) < self.batch_size {
                let Some(group) = due.complete.pop_first() else { break };
                taken.push(group);
            }
        }
        self.by_deadline.retain(|_, due| due.count() > 0);
        self.first_batch = self.first_batch.next();
        taken
    }

    pub(super) fn insert_running(&mut self, group: GroupId, deadline: Batch) {
        self.by_deadline.entry(deadline).or_default().running.insert(group);
    }

    pub(super) fn insert_complete(&mut self, group: GroupId, deadline: Batch) {
        self.by_deadline.entry(deadline).or_default().complete.insert(group);
    }

    pub(super) fn remove(&mut self, group: GroupId, deadline: Batch) {
        if let Some(due) = self.by_deadline.get_mut(&deadline) {
            due.running.remove(&group);
            due.complete.remove(&group);
            if due.count() == 0 {
                self.by_deadline.remove(&deadline);
            }
        }
    }

    /// Whether the capacity law is true, which every sequence of legal calls keeps so.
    pub(super) fn law_holds(&self) -> bool {
        let mut total = 0;
        self.by_deadline.iter().all(|(batch, due)| {
            total += due.count();
            *batch >= self.first_batch && total <= self.places_before(batch.next())
        })
    }

    /// Numbers of running and complete groups.
    pub(super) fn counts(&self) -> (u64, u64) {
        self.by_deadline.values().fold((0, 0), |(running, complete), due| {
            (running + due.running.len() as u64, complete + due.complete.len() as u64)
        })
    }
}
