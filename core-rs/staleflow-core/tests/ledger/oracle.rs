//! The law by brute force: tries every assignment of groups to batches and knows no formula.

/// Whether groups with these deadlines can each be given a batch from `first` on, at most `batch_size` to a batch
/// and none later than its deadline.
pub(crate) fn placeable(deadlines: &[u64], first: u64, batch_size: usize) -> bool {
    let last = deadlines.iter().copied().max().unwrap_or(first).max(first);
    let mut free = vec![batch_size; usize::try_from(last - first + 1).unwrap()];
    place_next(deadlines, first, &mut free)
}

fn place_next(deadlines: &[u64], first: u64, free: &mut [usize]) -> bool {
    let Some((deadline, others)) = deadlines.split_first() else { return true };
    (first..=*deadline).any(|batch| {
        let place = usize::try_from(batch - first).unwrap();
        if free[place] == 0 {
            return false;
        }
        free[place] -= 1;
        let placed = place_next(others, first, free);
        free[place] += 1;
        placed
    })
}

/// Whether some `batch_size` complete groups can fill batch `first` with the rest still placeable after it.
pub(crate) fn ready(complete: &[u64], running: &[u64], first: u64, batch_size: usize) -> bool {
    subsets(complete).any(|(chosen, left)| {
        let rest = [left.as_slice(), running].concat();
        chosen.len() == batch_size && placeable(&rest, first + 1, batch_size)
    })
}

/// How many running groups have to complete before batch `first` is ready, if any number is enough.
pub(crate) fn fewest_blockers(
    complete: &[u64],
    running: &[u64],
    first: u64,
    batch_size: usize,
) -> Option<usize> {
    subsets(running)
        .filter(|(done, left)| ready(&[complete, done.as_slice()].concat(), left, first, batch_size))
        .map(|(done, _)| done.len())
        .min()
}

/// Every way to split the items in two.
fn subsets(items: &[u64]) -> impl Iterator<Item = (Vec<u64>, Vec<u64>)> {
    (0..1_u32 << items.len()).map(|mask| {
        let chosen = |position: &usize| mask & (1 << position) != 0;
        let (inside, outside): (Vec<_>, Vec<_>) = (0..items.len()).partition(chosen);
        (inside.iter().map(|at| items[*at]).collect(), outside.iter().map(|at| items[*at]).collect())
    })
}
