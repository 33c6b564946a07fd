//! The guarantees of the ledger, one test each, named like the guarantee.

mod fuzz;
mod illegal_calls;
mod journal;
mod large_world;
mod oracle;
mod over_provisioning;
mod properties;
mod replay;
mod restore;
mod slot_ledger;
mod small_world;
mod world;
