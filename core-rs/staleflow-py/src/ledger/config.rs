//! Constructor arguments, checked one by one so that the error names the one at fault.

use pyo3::prelude::*;
use staleflow_core::ledger::config::{
    BATCH_SIZE, EXTRA_GROUPS, EXTRA_MEMBERS, GROUP_SIZE, LedgerConfig, MAX_STALENESS, Setting,
};

use crate::errors::raise;
use crate::ids::Integer;

/// The constructor's arguments as Python passed them.
pub(super) struct Arguments {
    pub(super) batch_size: Integer<i64>,
    pub(super) max_staleness: Integer<i64>,
    pub(super) group_size: Integer<i64>,
    pub(super) extra_groups: Integer<i64>,
    pub(super) extra_members: Integer<i64>,
}

impl Arguments {
    pub(super) fn check(self) -> PyResult<LedgerConfig> {
        let batch_size = checked(&BATCH_SIZE, self.batch_size)?;
        let max_staleness = checked(&MAX_STALENESS, self.max_staleness)?;
        let group_size = checked(&GROUP_SIZE, self.group_size)?;
        let extra_groups = checked(&EXTRA_GROUPS, self.extra_groups)?;
        let extra_members = checked(&EXTRA_MEMBERS, self.extra_members)?;
        LedgerConfig::new(batch_size, max_staleness, group_size)
            .and_then(|config| config.with_extra_groups(extra_groups))
            .and_then(|config| config.with_extra_members(extra_members))
            .map_err(raise)
    }
}

fn checked(setting: &Setting, value: Integer<i64>) -> PyResult<i64> {
    match value {
        Integer::Fits(value) => setting.check(value),
        Integer::TooWide(digits) => Err(setting.reject(digits)),
    }
    .map_err(raise)
}
