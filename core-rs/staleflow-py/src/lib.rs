//! The extension module `staleflow._core`: conversions and error mapping around `staleflow-core`, no decisions; and what
//! an engine answers, parsed and looked through token by token.
// Signatures of Python methods are given by Python: owned arguments, and `self` where a property asks for it.
#![allow(clippy::needless_pass_by_value)]

mod errors;
mod ids;
mod interpreter;
mod ledger;
mod queue;
mod reply;
mod stacks;
mod stall;
mod watchdog;

use pyo3::prelude::*;

/// The staleness ledger, the trajectory queue and the watch over the event loop, implemented in Rust.
#[pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::ledger::{Lease, LedgerReplay, LedgerStatistics, Refusal, StalenessLedger};
    #[pymodule_export]
    use crate::queue::{DeadlineQueue, QueueStatistics};
    #[pymodule_export]
    use crate::reply::{EngineReply, decode_reply, first_malformed_token};
    #[pymodule_export]
    use crate::stall::StallAlarm;
    #[pymodule_export]
    use crate::watchdog::LoopWatch;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::interpreter::claim(module.py())?;
        module.add("RefusalReason", crate::ledger::refusal_reasons(module.py())?)
    }
}
