//! The guarantees of the ledger, one test each, named like the guarantee.

mod illegal_calls;
mod journal;
mod oracle;
mod over_provisioning;
mod properties;
mod replay;
mod restore;
mod small_world;
