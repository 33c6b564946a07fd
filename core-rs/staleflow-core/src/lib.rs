//! The decisions of staleflow, as a pure library.
//!
//! Nothing here reads a clock, draws a random number, touches a file or knows of Python: the same calls in the
//! same order always give the same answers.
#![forbid(unsafe_code)]

pub mod error;
pub mod ids;
pub mod ledger;
pub mod queue;
pub mod stall;
