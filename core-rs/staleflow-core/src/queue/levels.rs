//! Items in the order in which they leave.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::Batch;

/// One queue per deadline. None of them is empty.
pub(super) struct Levels<T> {
    levels: BTreeMap<Batch, VecDeque<T>>,
    items: usize,
}

impl<T> Levels<T> {
    pub(super) fn new() -> Self {
        Self { levels: BTreeMap::new(), items: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items == 0
    }

    pub(super) fn push(&mut self, deadline: Batch, item: T) {
        self.levels.entry(deadline).or_default().push_back(item);
        self.items += 1;
    }

    /// Up to `max_items`, earliest deadline first, then as they came.
    pub(super) fn pop(&mut self, max_items: usize) -> Vec<T> {
        let wanted = max_items.min(self.items);
        let mut taken = Vec::with_capacity(wanted);
        while let Some(mut level) = self.levels.first_entry() {
            let items = level.get_mut();
            let share = items.len().min(wanted - taken.len());
            taken.extend(items.drain(..share));
            if !items.is_empty() {
                break;
            }
            level.remove();
        }
        self.items -= taken.len();
        taken
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.levels.values().flatten()
    }
}
