//! Feasibility by search. It seats groups in batches one by one, moves those already seated out of the way, and
//! tries every choice of groups; it knows no count that would tell the answer.

use std::collections::BTreeMap;

/// Whether groups with these deadlines can each be given a batch from `first` on, at most `places` to a batch and
/// none later than its deadline: a maximum bipartite matching by augmenting paths.
pub(crate) fn placeable(deadlines: &[u64], first: u64, places: usize) -> bool {
    let last = deadlines.iter().copied().max().unwrap_or(first).max(first);
    let batches = usize::try_from(last - first + 1).unwrap();
    let mut seating = Seating { deadlines, first, places, seated: vec![Vec::new(); batches] };
    (0..deadlines.len()).all(|group| seating.seat(group, &mut vec![false; batches]))
}

struct Seating<'a> {
    deadlines: &'a [u64],
    first: u64,
    places: usize,
    /// The groups in each batch.
    seated: Vec<Vec<usize>>,
}

impl Seating<'_> {
    /// Gives the group a place, if need be that of another one that can go elsewhere.
    fn seat(&mut self, group: usize, tried: &mut [bool]) -> bool {
        let Some(slack) = self.deadlines[group].checked_sub(self.first) else { return false };
        for batch in 0..=usize::try_from(slack).unwrap() {
            if tried[batch] {
                continue;
            }
            tried[batch] = true;
            if self.seated[batch].len() < self.places {
                self.seated[batch].push(group);
                return true;
            }
            for place in 0..self.places {
                if self.seat(self.seated[batch][place], tried) {
                    self.seated[batch][place] = group;
                    return true;
                }
            }
        }
        false
    }
}

/// The groups that are not leased, as an oracle sees them: by deadline alone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Live {
    pub(crate) running: Vec<u64>,
    pub(crate) complete: Vec<u64>,
}

impl Live {
    pub(crate) fn all(&self) -> Vec<u64> {
        [self.running.as_slice(), self.complete.as_slice()].concat()
    }

    /// The same groups with deadlines counted from `first`, or None if one is due before it.
    fn counted_from(&self, first: u64) -> Option<Self> {
        let counted = |deadlines: &[u64]| {
            let mut counted: Vec<u64> =
                deadlines.iter().map(|deadline| deadline.checked_sub(first)).collect::<Option<_>>()?;
            counted.sort_unstable();
            Some(counted)
        };
        Some(Self { running: counted(&self.running)?, complete: counted(&self.complete)? })
    }
}

/// Answers that were searched for once.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    placeable: BTreeMap<(Vec<u64>, usize), bool>,
    ready: BTreeMap<(Live, usize), bool>,
    fewest_blockers: BTreeMap<(Live, usize), Option<usize>>,
}

impl Oracle {
    /// As the function of this name.
    pub(crate) fn placeable(&mut self, deadlines: &[u64], first: u64, places: usize) -> bool {
        let live = Live { running: deadlines.to_vec(), complete: Vec::new() };
        let Some(live) = live.counted_from(first) else { return false };
        let key = (live.running, places);
        *self.placeable.entry(key).or_insert_with_key(|(counted, places)| placeable(counted, 0, *places))
    }

    /// How many groups of this deadline can join the live ones with every one of them placeable.
    pub(crate) fn room(&mut self, live: &[u64], deadline: u64, first: u64, places: usize) -> u64 {
        let mut joined = live.to_vec();
        let mut room = 0;
        loop {
            joined.push(deadline);
            if !self.placeable(&joined, first, places) {
                return room;
            }
            room += 1;
        }
    }

    /// Whether some `batch_size` complete groups can fill batch `first` with the rest placeable after it.
    pub(crate) fn ready(&mut self, live: &Live, first: u64, batch_size: usize) -> bool {
        let Some(live) = live.counted_from(first) else { return false };
        let key = (live, batch_size);
        if let Some(known) = self.ready.get(&key) {
            return *known;
        }
        let feasible = choices(&key.0.complete, batch_size).into_iter().any(|(_, left)| {
            let rest = Live { running: key.0.running.clone(), complete: left };
            self.placeable(&rest.all(), 1, batch_size)
        });
        self.ready.insert(key, feasible);
        feasible
    }

    /// How many running groups have to complete before batch `first` is ready, if any number is enough.
    pub(crate) fn fewest_blockers(&mut self, live: &Live, first: u64, batch_size: usize) -> Option<usize> {
        let live = live.counted_from(first)?;
        let key = (live, batch_size);
        if let Some(known) = self.fewest_blockers.get(&key) {
            return *known;
        }
        let fewest = (0..=key.0.running.len()).find(|count| {
            choices(&key.0.running, *count).into_iter().any(|(done, left)| {
                let complete = [key.0.complete.as_slice(), done.as_slice()].concat();
                self.ready(&Live { running: left, complete }, 0, batch_size)
            })
        });
        self.fewest_blockers.insert(key, fewest);
        fewest
    }
}

/// Every way to choose `count` of these sorted items, with what is left; equal items are not told apart.
fn choices(items: &[u64], count: usize) -> Vec<(Vec<u64>, Vec<u64>)> {
    let Some((&first, others)) = items.split_first() else {
        return if count == 0 { vec![(Vec::new(), Vec::new())] } else { Vec::new() };
    };
    let alike = 1 + others.iter().take_while(|item| **item == first).count();
    let mut found = Vec::new();
    for taken in 0..=alike.min(count) {
        for (mut chosen, mut left) in choices(&items[alike..], count - taken) {
            chosen.extend(std::iter::repeat_n(first, taken));
            left.extend(std::iter::repeat_n(first, alike - taken));
            found.push((chosen, left));
        }
    }
    found
}

/// Tries every assignment of groups to batches.
fn some_assignment_fits(deadlines: &[u64], free: &mut [usize]) -> bool {
    let Some((deadline, others)) = deadlines.split_first() else { return true };
    (0..=usize::try_from(*deadline).unwrap()).any(|batch| {
        if free[batch] == 0 {
            return false;
        }
        free[batch] -= 1;
        let fits = some_assignment_fits(others, free);
        free[batch] += 1;
        fits
    })
}

#[test]
fn matching_equals_trying_every_assignment() {
    let mut both = [0, 0];
    for count in 0..=6_u32 {
        for code in 0..4_u64.pow(count) {
            let deadlines: Vec<u64> = (0..count).map(|place| code / 4_u64.pow(place) % 4).collect();
            for places in 1..=3 {
                let expected = some_assignment_fits(&deadlines, &mut [places; 4]);
                assert_eq!(placeable(&deadlines, 0, places), expected, "{deadlines:?} by {places}");
                assert_eq!(placeable(&deadlines, 1, places), {
                    let later: Option<Vec<u64>> = deadlines.iter().map(|due| due.checked_sub(1)).collect();
                    later.is_some_and(|later| some_assignment_fits(&later, &mut [places; 4]))
                });
                both[usize::from(expected)] += 1;
            }
        }
    }
    assert!(both[0] > 1000 && both[1] > 1000, "{both:?}");
}

#[test]
fn choices_are_all_and_distinct() {
    assert_eq!(choices(&[], 0), [(vec![], vec![])]);
    assert_eq!(choices(&[1], 2), []);
    let mut found = choices(&[1, 1, 2], 2);
    found.sort();
    assert_eq!(found, [(vec![1, 1], vec![2]), (vec![2, 1], vec![1])]);
}
