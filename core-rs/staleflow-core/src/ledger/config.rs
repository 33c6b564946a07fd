//! What is fixed for the life of a ledger.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::error::LedgerError;

/// A constructor argument and the values it may take.
#[derive(Debug, Clone)]
pub struct Setting {
    /// The argument's name.
    pub name: &'static str,
    range: RangeInclusive<i64>,
    allowed: &'static str,
}

/// Groups per train step.
pub const BATCH_SIZE: Setting = Setting::new("batch_size", 1..=2_147_483_647, "1 to 2147483647 groups");

/// The staleness bound in published versions.
pub const MAX_STALENESS: Setting = Setting::new("max_staleness", 0..=1_000_000, "0 to 1000000 versions");

/// Trajectories per group. Every live group keeps a record per member, so the limit bounds one admission's memory.
pub const GROUP_SIZE: Setting = Setting::new("group_size", 1..=65_536, "1 to 65536 trajectories");

/// Groups admitted beyond the batch size.
pub const EXTRA_GROUPS: Setting =
    Setting::new("extra_groups", 0..=0, "only 0, over-provisioning is not available yet");

/// Members started beyond the group size.
pub const EXTRA_MEMBERS: Setting =
    Setting::new("extra_members", 0..=0, "only 0, over-provisioning is not available yet");

impl Setting {
    const fn new(name: &'static str, range: RangeInclusive<i64>, allowed: &'static str) -> Self {
        Self { name, range, allowed }
    }

    /// The value, if it lies in the allowed range.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] naming the setting, the value and the range.
    pub fn check(&self, value: i64) -> Result<i64, LedgerError> {
        if self.range.contains(&value) { Ok(value) } else { Err(self.reject(value)) }
    }

    /// The error for a value outside the range, which may be too large for any integer type.
    pub fn reject(&self, value: impl Display) -> LedgerError {
        LedgerError::Argument { name: self.name, value: value.to_string(), allowed: self.allowed.to_owned() }
    }
}

/// Sizes and the bound of one ledger. Only checked values can be constructed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerConfig {
    batch_size: u32,
    max_staleness: u32,
    group_size: u32,
}

impl LedgerConfig {
    /// Checks each value against its [`Setting`].
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for the first value out of range.
    pub fn new(batch_size: i64, max_staleness: i64, group_size: i64) -> Result<Self, LedgerError> {
        let checked = |setting: &Setting, value| {
            u32::try_from(setting.check(value)?).map_err(|_| setting.reject(value))
        };
        Ok(Self {
            batch_size: checked(&BATCH_SIZE, batch_size)?,
            max_staleness: checked(&MAX_STALENESS, max_staleness)?,
            group_size: checked(&GROUP_SIZE, group_size)?,
        })
    }

    /// Groups per train step.
    #[must_use]
    pub fn batch_size(&self) -> u64 {
        self.batch_size.into()
    }

    /// The staleness bound in published versions.
    #[must_use]
    pub fn max_staleness(&self) -> u64 {
        self.max_staleness.into()
    }

    /// Trajectories per group.
    #[must_use]
    pub fn group_size(&self) -> u32 {
        self.group_size
    }

    /// Whether deserialized values are ones that [`LedgerConfig::new`] would accept.
    pub(super) fn is_valid(&self) -> bool {
        Self::new(self.batch_size.into(), self.max_staleness.into(), self.group_size.into()).is_ok()
    }
}
