//! A ledger of slots, the other way to keep a staleness bound, and what it refuses that the law allows.
//!
//! This is a reading of the protocol in the `StaleFlow` paper (arXiv 2601.12784). Each batch is a *buffer* of `B`
//! entries, and every live group holds one entry:
//!
//! - **Reserve.** A group that begins at version `V` reserves an entry in the latest buffer with one free, from
//!   `V + eta` down to the next batch: the worst case for its age. Without one it is refused. (A stricter reading
//!   looks at buffer `V + eta` alone; it would refuse more.)
//! - **Occupy.** When the group completes it gives up its reservation, and occupies an entry in the earliest buffer
//!   where one is free or can be freed by *one exchange*: a running group whose deadline allows it takes over the
//!   reservation that was given up.
//! - **Consume.** The next buffer is handed out when all its entries are occupied. An occupied entry never moves.
//!
//! **How the two are compared.** Where the law allows more, their histories would part and there would be nothing
//! left to compare. So both ledgers follow the decisions of the slots, and each is asked in every state what it
//! would answer. They still hand out different groups: the slots what lies in the buffer, the law what is due first.
//! The complete groups left in one are therefore paired with those left in the other by order of deadline, and what
//! happens to one of a pair happens to the other. The law's partner is never due earlier, which is asserted: it is
//! why the slots cannot overtake it.

use std::collections::{BTreeMap, BTreeSet};

use staleflow_core::ids::{GroupId, Version};
use staleflow_core::ledger::{Ledger, LedgerConfig};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Reserved(GroupId),
    Occupied(GroupId),
}

impl Entry {
    fn group(self) -> GroupId {
        match self {
            Self::Reserved(group) | Self::Occupied(group) => group,
        }
    }
}

/// The buffers from the next batch on. Knows nothing of the law.
#[derive(Debug, Clone)]
struct SlotLedger {
    batch_size: usize,
    next_batch: u64,
    buffers: BTreeMap<u64, Vec<Entry>>,
    deadlines: BTreeMap<GroupId, u64>,
}

impl SlotLedger {
    fn new(batch_size: usize) -> Self {
        Self { batch_size, next_batch: 0, buffers: BTreeMap::new(), deadlines: BTreeMap::new() }
    }

    fn entries(&self, batch: u64) -> &[Entry] {
        self.buffers.get(&batch).map_or(&[], Vec::as_slice)
    }

    fn has_room(&self, batch: u64) -> bool {
        self.entries(batch).len() < self.batch_size
    }

    fn latest_with_room(&self, deadline: u64) -> Option<u64> {
        (self.next_batch..=deadline).rev().find(|batch| self.has_room(*batch))
    }

    fn reserve(&mut self, group: GroupId, deadline: u64) {
        let batch = self.latest_with_room(deadline).expect("the slots admit the group");
        self.buffers.entry(batch).or_default().push(Entry::Reserved(group));
        self.deadlines.insert(group, deadline);
    }

    fn occupy(&mut self, group: GroupId, deadline: u64) {
        let given_up = self.free(group);
        self.deadlines.insert(group, deadline);
        for batch in self.next_batch..=deadline {
            if !self.has_room(batch) {
                let Some(place) = self.exchangeable(batch, given_up) else { continue };
                let moved = self.buffers.get_mut(&batch).unwrap().remove(place);
                self.buffers.entry(given_up).or_default().push(moved);
            }
            self.buffers.entry(batch).or_default().push(Entry::Occupied(group));
            return;
        }
        unreachable!("the entry that was given up is free");
    }

    /// An entry of this buffer whose running group can wait until the other buffer.
    fn exchangeable(&self, batch: u64, other: u64) -> Option<usize> {
        self.entries(batch).iter().position(|entry| match entry {
            Entry::Reserved(group) => self.deadlines[group] >= other,
            Entry::Occupied(_) => false,
        })
    }

    /// Takes the group out, and names the buffer it was in.
    fn free(&mut self, group: GroupId) -> u64 {
        self.deadlines.remove(&group);
        let held = self.buffers.iter_mut().find_map(|(batch, entries)| {
            let place = entries.iter().position(|entry| entry.group() == group)?;
            entries.remove(place);
            Some(*batch)
        });
        held.expect("every live group holds an entry")
    }

    fn is_ready(&self) -> bool {
        let occupied = |entry: &Entry| matches!(entry, Entry::Occupied(_));
        !self.has_room(self.next_batch) && self.entries(self.next_batch).iter().all(occupied)
    }

    fn consume(&mut self) {
        for entry in self.buffers.remove(&self.next_batch).unwrap_or_default() {
            self.deadlines.remove(&entry.group());
        }
        self.next_batch += 1;
    }
}

/// Who said yes.
#[derive(Debug, Clone, Copy, Default)]
struct Verdicts {
    both: u64,
    neither: u64,
    only_law: u64,
    only_slots: u64,
}

impl Verdicts {
    fn count(&mut self, law: bool, slots: bool) {
        *match (law, slots) {
            (true, true) => &mut self.both,
            (false, false) => &mut self.neither,
            (true, false) => &mut self.only_law,
            (false, true) => &mut self.only_slots,
        } += 1;
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Comparison {
    states: u64,
    admits: Verdicts,
    ready: Verdicts,
}

impl Comparison {
    fn print_and_check(&self, worlds: &str) {
        println!("{worlds}: {} states in which law and slots were asked", self.states);
        for (question, verdicts) in [("admits", self.admits), ("ready", self.ready)] {
            let Verdicts { both, neither, only_law, only_slots } = verdicts;
            println!(
                "  {question:6}: both {both}, neither {neither}, only law {only_law}, only slots {only_slots}"
            );
            assert_eq!(only_slots, 0);
            assert!(only_law > 0 && both > 0 && neither > 0, "nothing was compared");
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Move {
    Admit(u64),
    Complete(GroupId, Option<u64>),
    End(GroupId),
    Consume,
    Publish,
}

/// Both ledgers, with one history.
#[derive(Debug, Clone)]
struct Pair {
    law: Ledger,
    slots: SlotLedger,
    staleness: u64,
    published: u64,
    held: bool,
    running: BTreeMap<GroupId, u64>,
    /// The complete groups of the slots, each with its deadline and its partner in the law.
    complete: BTreeMap<GroupId, (u64, GroupId)>,
}

impl Pair {
    fn new(batch_size: usize, staleness: u64) -> Self {
        let [batch, bound] = [batch_size as u64, staleness].map(|number| i64::try_from(number).unwrap());
        Self {
            law: Ledger::new(LedgerConfig::new(batch, bound, 1).unwrap()),
            slots: SlotLedger::new(batch_size),
            staleness,
            published: 0,
            held: false,
            running: BTreeMap::new(),
            complete: BTreeMap::new(),
        }
    }

    fn engine_versions(&self) -> std::ops::RangeInclusive<u64> {
        self.slots.next_batch.saturating_sub(self.staleness)..=self.published
    }

    fn slots_admit(&self, engine: u64) -> bool {
        self.slots.latest_with_room(engine + self.staleness).is_some()
    }

    fn compare(&self, comparison: &mut Comparison) {
        comparison.states += 1;
        for engine in self.engine_versions() {
            let law = self.law.capacity(Version(engine)) > 0;
            comparison.admits.count(law, self.slots_admit(engine));
        }
        if !self.held {
            comparison.ready.count(self.law.is_ready(), self.slots.is_ready());
        }
    }

    /// What the slots allow.
    fn moves(&self) -> Vec<Move> {
        let mut moves: Vec<Move> =
            self.engine_versions().filter(|engine| self.slots_admit(*engine)).map(Move::Admit).collect();
        for (group, version) in &self.running {
            moves.push(Move::Complete(*group, None));
            moves.extend((version + 1..=self.published).map(|report| Move::Complete(*group, Some(report))));
        }
        moves.extend(self.running.keys().chain(self.complete.keys()).map(|group| Move::End(*group)));
        if self.held {
            moves.push(Move::Publish);
        } else if self.slots.is_ready() {
            moves.push(Move::Consume);
        }
        moves
    }

    fn apply(&mut self, next: Move) {
        match next {
            Move::Admit(engine) => {
                let group = self.law.admit(Version(engine)).expect("the law admits what the slots admit");
                self.slots.reserve(group, engine + self.staleness);
                self.running.insert(group, engine);
            }
            Move::Complete(group, report) => {
                let version = report.unwrap_or(self.running[&group]);
                self.running.remove(&group);
                self.law.complete(group, report.map(Version)).unwrap();
                self.slots.occupy(group, version + self.staleness);
                self.complete.insert(group, (version + self.staleness, group));
            }
            Move::End(group) => {
                self.slots.free(group);
                self.running.remove(&group);
                let partner = self.complete.remove(&group).map_or(group, |(_, partner)| partner);
                self.law.abort(partner, "moved").unwrap();
            }
            Move::Consume => self.consume(),
            Move::Publish => {
                self.published += 1;
                self.held = false;
                self.law.publish(Version(self.published)).unwrap();
            }
        }
    }

    fn consume(&mut self) {
        let lease = self.law.consume().expect("the law is ready when the slots are");
        let due = |group: GroupId| self.law.group_version(group).unwrap().0 + self.staleness;
        let leased = BTreeSet::from_iter(lease.groups);
        let partners = self.complete.values().map(|(_, partner)| *partner);
        let mut left_in_law: Vec<(u64, GroupId)> = partners
            .filter(|partner| !leased.contains(partner))
            .map(|partner| (due(partner), partner))
            .collect();
        left_in_law.sort_unstable();

        self.slots.consume();
        let held = self.slots.deadlines.keys().filter(|group| self.complete.contains_key(*group));
        let mut left_in_slots: Vec<(u64, GroupId)> =
            held.map(|group| (self.complete[group].0, *group)).collect();
        left_in_slots.sort_unstable();

        assert_eq!(left_in_law.len(), left_in_slots.len());
        let pairs = left_in_slots.into_iter().zip(left_in_law);
        self.complete = pairs
            .map(|((due, group), (due_in_law, partner))| {
                assert!(due_in_law >= due, "the law keeps what is due later");
                (group, (due, partner))
            })
            .collect();
        self.held = true;
    }

    /// The state up to a renaming of groups and a shift of all versions.
    fn shape(&self) -> Vec<u8> {
        let byte = |number: u64| u8::try_from(number).unwrap();
        let age = |deadline: u64| byte(self.published + self.staleness + 1 - deadline);
        let mut shape = vec![u8::from(self.held), byte(self.published.min(self.staleness + 1))];
        for batch in self.slots.next_batch..=self.published + self.staleness {
            let mut entries: Vec<[u8; 3]> = self
                .slots
                .entries(batch)
                .iter()
                .map(|entry| match entry {
                    Entry::Reserved(group) => [0, age(self.slots.deadlines[group]), 0],
                    Entry::Occupied(group) => {
                        let (due, partner) = self.complete[group];
                        [1, age(due), age(self.law.group_version(partner).unwrap().0 + self.staleness)]
                    }
                })
                .collect();
            entries.sort_unstable();
            shape.push(byte(entries.len() as u64));
            shape.extend(entries.concat());
        }
        shape
    }
}

fn compare_in_every_state(batch_size: usize, staleness: u64, comparison: &mut Comparison) {
    let start = Pair::new(batch_size, staleness);
    let mut seen = BTreeSet::from([start.shape()]);
    let mut unexplored = vec![start];
    while let Some(pair) = unexplored.pop() {
        pair.compare(comparison);
        for next in pair.moves() {
            let mut reached = pair.clone();
            reached.apply(next);
            if seen.insert(reached.shape()) {
                unexplored.push(reached);
            }
        }
    }
}

/// Walks that admit twice as often as they end groups, over batches and bounds too large for every state.
fn compare_on_random_walks(walks: u64, comparison: &mut Comparison) {
    for seed in 0..walks {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut pair = Pair::new(random.usize(1..=8), random.u64(0..=5));
        for _ in 0..300 {
            let moves = pair.moves();
            let wanted = random.u8(0..10);
            let some: Vec<Move> = moves
                .iter()
                .copied()
                .filter(|next| match next {
                    Move::Admit(_) => wanted < 4,
                    Move::Complete(..) => (4..7).contains(&wanted),
                    Move::End(_) => wanted == 7,
                    Move::Consume | Move::Publish => wanted > 7,
                })
                .collect();
            if let Some(next) = random.choice(some) {
                pair.apply(next);
                pair.compare(comparison);
            }
        }
    }
}

#[test]
fn dominates_slot_ledger() {
    let mut comparison = Comparison::default();
    for (batch_size, staleness) in [(1, 1), (1, 2), (2, 1)] {
        compare_in_every_state(batch_size, staleness, &mut comparison);
    }
    compare_on_random_walks(100, &mut comparison);
    comparison.print_and_check("a few worlds");
}

#[test]
#[ignore = "takes a minute; make prove runs it"]
fn dominates_slot_ledger_in_many_worlds() {
    let mut comparison = Comparison::default();
    for (batch_size, staleness) in [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)] {
        compare_in_every_state(batch_size, staleness, &mut comparison);
    }
    comparison.print_and_check("every state of 9 small worlds");
    let mut comparison = Comparison::default();
    compare_on_random_walks(5_000, &mut comparison);
    comparison.print_and_check("5000 random walks");
}
