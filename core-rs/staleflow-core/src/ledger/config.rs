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
pub const BATCH_SIZE: Setting = Setting::new("batch_size", 1..=16_777_216, "1 to 16777216 groups");

/// The staleness bound in published versions.
pub const MAX_STALENESS: Setting = Setting::new("max_staleness", 0..=1_000_000, "0 to 1000000 versions");

/// Trajectories per group. Every live group keeps a record per member, so the limit bounds one admission's memory.
pub const GROUP_SIZE: Setting = Setting::new("group_size", 1..=65_536, "1 to 65536 trajectories");

/// Groups admitted beyond the batch size, for every batch.
pub const EXTRA_GROUPS: Setting = Setting::new("extra_groups", 0..=16_777_216, "0 to 16777216 groups");

/// Members played beyond the group size, in every group.
pub const EXTRA_MEMBERS: Setting = Setting::new("extra_members", 0..=65_536, "0 to 65536 trajectories");

/// Trajectories that a ledger's groups may have together, all places taken. Each costs a record of a few bytes, so
/// this bounds the memory that one call can ask for.
const MAX_LIVE_TRAJECTORIES: u64 = 1 << 28;

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
    extra_groups: u32,
    extra_members: u32,
}

impl LedgerConfig {
    /// Without over-provisioning. Checks each value against its [`Setting`].
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for the first value out of range.
    pub fn new(batch_size: i64, max_staleness: i64, group_size: i64) -> Result<Self, LedgerError> {
        Self {
            batch_size: checked(&BATCH_SIZE, batch_size)?,
            max_staleness: checked(&MAX_STALENESS, max_staleness)?,
            group_size: checked(&GROUP_SIZE, group_size)?,
            extra_groups: 0,
            extra_members: 0,
        }
        .within_memory()
    }

    /// Batch redundancy: admits `extra_groups` more for every batch than it will hold.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for a value out of range.
    pub fn with_extra_groups(self, extra_groups: i64) -> Result<Self, LedgerError> {
        Self { extra_groups: checked(&EXTRA_GROUPS, extra_groups)?, ..self }.within_memory()
    }

    /// Group redundancy: plays `extra_members` more in every group than it needs.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] for a value out of range.
    pub fn with_extra_members(self, extra_members: i64) -> Result<Self, LedgerError> {
        Self { extra_members: checked(&EXTRA_MEMBERS, extra_members)?, ..self }.within_memory()
    }

    /// Refuses sizes that are each right and together too much.
    fn within_memory(self) -> Result<Self, LedgerError> {
        let places = self.batch_size() + self.extra_groups();
        let members = self.members() as u64;
        // The largest sizes multiply to less than 2^63.
        if (self.max_staleness() + 1) * places * members <= MAX_LIVE_TRAJECTORIES {
            return Ok(self);
        }
        let most = (MAX_LIVE_TRAJECTORIES / places / members).saturating_sub(1);
        let allowed = format!(
            "with {places} groups of {members} admitted for a batch, {MAX_LIVE_TRAJECTORIES} trajectories could be \
             live at most, so at most {most} versions"
        );
        Err(LedgerError::Argument { name: "max_staleness", value: self.max_staleness.to_string(), allowed })
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

    /// Trajectories per group: as many members must finish.
    #[must_use]
    pub fn group_size(&self) -> u32 {
        self.group_size
    }

    /// Groups admitted beyond the batch size.
    #[must_use]
    pub fn extra_groups(&self) -> u64 {
        self.extra_groups.into()
    }

    /// Members played beyond the group size.
    #[must_use]
    pub fn extra_members(&self) -> u32 {
        self.extra_members
    }

    /// Members of a group, those that it does not need included.
    #[must_use]
    pub fn members(&self) -> usize {
        self.group_size as usize + self.extra_members as usize
    }

    /// Whether deserialized values are ones that the constructors would accept.
    pub(super) fn is_valid(&self) -> bool {
        Self::new(self.batch_size.into(), self.max_staleness.into(), self.group_size.into())
            .and_then(|config| config.with_extra_groups(self.extra_groups.into()))
            .and_then(|config| config.with_extra_members(self.extra_members.into()))
            .is_ok()
    }
}

fn checked(setting: &Setting, value: i64) -> Result<u32, LedgerError> {
    u32::try_from(setting.check(value)?).map_err(|_| setting.reject(value))
}
