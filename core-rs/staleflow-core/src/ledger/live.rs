//! The live groups, found by id in constant time.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;
use slab::Slab;

use super::group::{Group, GroupRecord, Member};
use crate::error::GroupState;
use crate::ids::GroupId;

/// Every live group with its members.
///
/// Groups lie in a slab; the members of the group in place `i` are the `i`-th stretch of one flat vector, so a
/// group costs no allocation of its own. The index from ids to places is never iterated: its order decides nothing.
#[derive(Debug, Clone)]
pub(super) struct LiveGroups {
    members_each: usize,
    groups: Slab<Group>,
    members: Vec<Member>,
    places: HashTable<usize>,
}

impl LiveGroups {
    /// No groups; each will have so many members.
    pub(super) fn new(members_each: usize) -> Self {
        Self { members_each, groups: Slab::new(), members: Vec::new(), places: HashTable::new() }
    }

    pub(super) fn get(&self, id: GroupId) -> Option<&Group> {
        self.groups.get(self.place(id)?)
    }

    pub(super) fn is_complete(&self, id: GroupId) -> bool {
        self.get(id).is_some_and(|group| group.state() == GroupState::Complete)
    }

    pub(super) fn get_mut(&mut self, id: GroupId) -> Option<(&mut Group, &mut [Member])> {
        let place = self.place(id)?;
        let stretch = self.stretch(place);
        Some((self.groups.get_mut(place)?, &mut self.members[stretch]))
    }

    /// Takes in a group whose first member runs and whose others wait.
    pub(super) fn insert(&mut self, group: Group) {
        let place = self.insert_waiting(group);
        let first = self.stretch(place).start;
        self.members[first].start();
    }

    /// Takes in a group as a snapshot kept it; it has the right number of members.
    pub(super) fn insert_record(&mut self, record: &GroupRecord) {
        let place = self.insert_waiting(record.group);
        let stretch = self.stretch(place);
        self.members[stretch].copy_from_slice(&record.members);
    }

    pub(super) fn remove(&mut self, id: GroupId) -> Option<Group> {
        let is_it = |place: &usize| self.groups[*place].id == id;
        let (place, _) = self.places.find_entry(hash(id), is_it).ok()?.remove();
        self.groups.try_remove(place)
    }

    /// In no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().map(|(_, group)| group)
    }

    /// All groups, oldest first.
    pub(super) fn records(&self) -> Vec<GroupRecord> {
        let mut records: Vec<_> = self
            .groups
            .iter()
            .map(|(place, group)| GroupRecord {
                group: *group,
                members: self.members[self.stretch(place)].to_vec(),
            })
            .collect();
        records.sort_unstable_by_key(|record| record.group.id);
        records
    }

    fn insert_waiting(&mut self, group: Group) -> usize {
        let place = self.groups.insert(group);
        let stretch = self.stretch(place);
        if self.members.len() < stretch.end {
            self.members.resize(stretch.end, Member::WAITING);
        } else {
            self.members[stretch].fill(Member::WAITING);
        }
        let groups = &self.groups;
        self.places.insert_unique(hash(group.id), place, |place| hash(groups[*place].id));
        place
    }

    fn place(&self, id: GroupId) -> Option<usize> {
        self.places.find(hash(id), |place| self.groups[*place].id == id).copied()
    }

    fn stretch(&self, place: usize) -> std::ops::Range<usize> {
        let start = place * self.members_each;
        start..start + self.members_each
    }
}

fn hash(id: GroupId) -> u64 {
    FxBuildHasher.hash_one(id)
}
