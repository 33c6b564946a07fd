//! When a stall is worth telling of.

use std::time::Duration;

/// Watches one thing that should keep moving. It has no clock: whoever has one says how long the thing has stood still.
///
/// A stall is told of once it has lasted the limit, again each time it has lasted twice as long as when it was told of
/// last, and once more when it is over.
#[derive(Debug, Clone)]
pub struct StallAlarm {
    limit: Duration,
    due: Duration,
    told: bool,
}

impl StallAlarm {
    /// An alarm that is quiet until something has stood still for `limit`.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { limit, due: limit, told: false }
    }

    /// It has stood still for so long by now: whether to tell of it.
    pub fn stands_still(&mut self, lasted: Duration) -> bool {
        if lasted < self.due {
            return false;
        }
        self.due = lasted.saturating_mul(2);
        self.told = true;
        true
    }

    /// It has moved: whether a stall that was told of is over.
    pub fn moves(&mut self) -> bool {
        self.due = self.limit;
        std::mem::take(&mut self.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told_at(alarm: &mut StallAlarm, seconds: std::ops::RangeInclusive<u64>) -> Vec<u64> {
        seconds.filter(|&second| alarm.stands_still(Duration::from_secs(second))).collect()
    }

    #[test]
    fn a_stall_is_told_of_at_the_limit_and_at_every_doubling() {
        let mut alarm = StallAlarm::new(Duration::from_secs(10));
        assert_eq!(told_at(&mut alarm, 0..=100), [10, 20, 40, 80]);
    }

    #[test]
    fn a_stall_noticed_late_doubles_from_when_it_was_noticed() {
        let mut alarm = StallAlarm::new(Duration::from_secs(10));
        assert_eq!(told_at(&mut alarm, 17..=100), [17, 34, 68]);
    }

    #[test]
    fn the_end_is_told_of_only_if_the_stall_was() {
        let mut alarm = StallAlarm::new(Duration::from_secs(10));
        assert!(!alarm.moves());
        assert!(told_at(&mut alarm, 0..=9).is_empty());
        assert!(!alarm.moves());
        assert_eq!(told_at(&mut alarm, 0..=30), [10, 20]);
        assert!(alarm.moves());
        assert!(!alarm.moves());
    }

    #[test]
    fn every_stall_has_the_whole_limit() {
        let mut alarm = StallAlarm::new(Duration::from_secs(10));
        for _ in 0..3 {
            assert_eq!(told_at(&mut alarm, 0..=15), [10]);
            alarm.moves();
        }
    }
}
