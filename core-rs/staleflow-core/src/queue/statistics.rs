//! What went through a queue.

/// Counts at one instant.
///
/// **Accounting law.** Everything that was put has been taken or is held. The number of items put is therefore not
/// stored and cannot be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Items that the consumer took.
    pub taken: u64,
    /// Places taken at this instant.
    pub held: u64,
    /// Items given back because the queue was full.
    pub refused: u64,
    /// Times that a waiting consumer was woken.
    pub wakes: u64,
    /// The most places that were ever taken at one time.
    pub high_water: u64,
}

impl Statistics {
    /// Items ever accepted.
    #[must_use]
    pub fn put(&self) -> u64 {
        self.taken + self.held
    }
}
