//! Live groups counted by deadline, and the two questions the law answers about them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::iter;

use crate::ids::{Batch, GroupId};

/// The groups that still need a place in a batch.
///
/// **Capacity law.** For every batch `b >= first_batch`, at most `(b - first_batch + 1) * places` groups have a
/// deadline of `b` or earlier. This is Hall's condition for unit jobs with deadlines: it holds exactly if all
/// groups can be placed without one being late.
///
/// There are as many places to a batch as groups, `batch_size`, unless the ledger admits extra groups. Then the law
/// only limits admission, and what a batch leaves behind at its deadline expires.
///
/// Only deadlines that some group has are stored. Between two of them the left side is constant and the right
/// side grows, so checking the stored ones checks every batch. There are at most `max_staleness + 1`.
#[derive(Debug, Clone)]
pub(super) struct Window {
    batch_size: u64,
    extra_groups: u64,
    first_batch: Batch,
    /// In order of deadline; none is empty.
    dues: VecDeque<Due>,
}

/// The groups of one deadline.
#[derive(Debug, Clone)]
struct Due {
    deadline: Batch,
    running: u64,
    complete: u64,
    /// Ids of the complete groups, and of some that have ended since.
    queue: BinaryHeap<Reverse<GroupId>>,
}

/// A queue this short is not worth cleaning of ended groups.
const SHORT_QUEUE: usize = 32;

impl Due {
    fn count(&self) -> u64 {
        self.running + self.complete
    }
}

impl Window {
    /// No groups; the first batch to fill is `first_batch`.
    pub(super) fn new(batch_size: u64, extra_groups: u64, first_batch: Batch) -> Self {
        Self { batch_size, extra_groups, first_batch, dues: VecDeque::new() }
    }

    /// How many more groups of this deadline the law allows.
    pub(super) fn vacancies(&self, deadline: Batch) -> u64 {
        self.slack_from(deadline).map(|(_, free)| free).min().unwrap_or(0)
    }

    /// The first batch up to which no place is left for a group of this deadline.
    pub(super) fn first_full(&self, deadline: Batch) -> Option<Batch> {
        let full = || self.slack_from(deadline).find(|(_, free)| *free == 0).map(|(batch, _)| batch);
        self.first_overfull_before(deadline).or_else(full)
    }

    /// The first batch before `deadline` that the law is false for, which only extra groups can make it.
    fn first_overfull_before(&self, deadline: Batch) -> Option<Batch> {
        if self.extra_groups == 0 {
            return None;
        }
        let mut total = 0;
        let earlier = self.dues.iter().take_while(|due| due.deadline < deadline);
        let mut totals = earlier.map(|due| {
            total += due.count();
            (due.deadline, total)
        });
        let overfull = |(batch, total): &(Batch, u64)| *total > self.places_before(batch.next());
        totals.find(overfull).map(|(batch, _)| batch)
    }

    /// The free places up to `deadline`, then up to each later stored deadline: all the counts in which one
    /// more group would appear.
    fn slack_from(&self, deadline: Batch) -> impl Iterator<Item = (Batch, u64)> {
        let later = self.dues.partition_point(|due| due.deadline <= deadline);
        let mut total: u64 = self.dues.range(..later).map(Due::count).sum();
        iter::once((deadline, total))
            .chain(self.dues.range(later..).map(move |due| {
                total += due.count();
                (due.deadline, total)
            }))
            .map(|(batch, total)| (batch, self.places_before(batch.next()).saturating_sub(total)))
    }

    /// Places in the batches from the first one up to, not including, `batch`.
    fn places_before(&self, batch: Batch) -> u64 {
        let places = self.batch_size + self.extra_groups;
        batch.0.saturating_sub(self.first_batch.0).saturating_mul(places)
    }

    /// How many running groups must finish before the first batch can be filled; 0 means it can be filled now.
    ///
    /// Filling it takes `batch_size` complete groups whose removal leaves the law true from the next batch on.
    /// With the earliest deadlines taken first, `max(R(b), C(b) - batch_size)` groups due by `b` remain, where
    /// `R` counts running and `C` all groups. The law now bounds the second term, so only `R(b)` can stand in
    /// the way. With extra groups nobody's place is kept, and nothing stands in the way.
    pub(super) fn shortfall(&self) -> u64 {
        let (_, complete) = self.counts();
        let missing = self.batch_size.saturating_sub(complete);
        if self.extra_groups > 0 {
            return missing;
        }
        let mut running = 0;
        self.dues.iter().fold(missing, |shortfall, due| {
            running += due.running;
            shortfall.max(running.saturating_sub(self.places_before(due.deadline)))
        })
    }

    /// Fills the first batch with the complete groups due first, in admission order among equals, and moves on
    /// to the next batch. Call only while [`Window::shortfall`] is 0; `is_complete` knows which groups have ended.
    pub(super) fn take_batch(&mut self, is_complete: impl Fn(GroupId) -> bool) -> Vec<GroupId> {
        let mut taken = Vec::new();
        for due in &mut self.dues {
            while (taken.len() as u64) < self.batch_size {
                let Some(Reverse(group)) = due.queue.pop() else { break };
                if is_complete(group) {
                    due.complete -= 1;
                    taken.push(group);
                }
            }
        }
        self.dues.retain(|due| due.count() > 0);
        self.first_batch = self.first_batch.next();
        taken
    }

    /// Forgets the groups whose deadline has passed; returns whether there were any.
    pub(super) fn drop_late(&mut self) -> bool {
        let kept = self.dues.partition_point(|due| due.deadline < self.first_batch);
        self.dues.drain(..kept).next().is_some()
    }

    pub(super) fn first_batch(&self) -> Batch {
        self.first_batch
    }

    pub(super) fn insert_running(&mut self, deadline: Batch, groups: u64) {
        self.due_or_insert(deadline).running += groups;
    }

    pub(super) fn insert_complete(&mut self, group: GroupId, deadline: Batch) {
        let due = self.due_or_insert(deadline);
        due.complete += 1;
        due.queue.push(Reverse(group));
    }

    pub(super) fn remove_running(&mut self, deadline: Batch) {
        self.remove(deadline, |due| due.running -= 1);
    }

    /// Call after the group has ended; `is_complete` says so of it and of others before it.
    pub(super) fn remove_complete(&mut self, deadline: Batch, is_complete: impl Fn(GroupId) -> bool) {
        self.remove(deadline, |due| {
            due.complete -= 1;
            // Halving keeps the cost of cleaning, shared among the groups that ended, constant.
            if due.queue.len() > SHORT_QUEUE && due.queue.len() as u64 > 2 * due.complete {
                due.queue.retain(|Reverse(group)| is_complete(*group));
            }
        });
    }

    fn remove(&mut self, deadline: Batch, remove: impl FnOnce(&mut Due)) {
        let at = self.dues.partition_point(|due| due.deadline < deadline);
        if let Some(due) = self.dues.get_mut(at).filter(|due| due.deadline == deadline) {
            remove(due);
            if due.count() == 0 {
                self.dues.remove(at);
            }
        }
    }

    fn due_or_insert(&mut self, deadline: Batch) -> &mut Due {
        let at = self.dues.partition_point(|due| due.deadline < deadline);
        if self.dues.get(at).is_none_or(|due| due.deadline != deadline) {
            self.dues.insert(at, Due { deadline, running: 0, complete: 0, queue: BinaryHeap::new() });
        }
        &mut self.dues[at]
    }

    /// Whether no group is late and the capacity law is true, which every sequence of legal calls keeps so. With
    /// extra groups only admission checks the law, and only the sum of it stays true.
    pub(super) fn law_holds(&self, max_staleness: u64) -> bool {
        let mut total = 0;
        self.dues.iter().all(|due| {
            total += due.count();
            let limit = if self.extra_groups > 0 {
                self.places_before(Batch(self.first_batch.0 + max_staleness).next())
            } else {
                self.places_before(due.deadline.next())
            };
            due.deadline >= self.first_batch && total <= limit
        })
    }

    /// Numbers of running and complete groups.
    pub(super) fn counts(&self) -> (u64, u64) {
        self.dues
            .iter()
            .fold((0, 0), |(running, complete), due| (running + due.running, complete + due.complete))
    }
}
