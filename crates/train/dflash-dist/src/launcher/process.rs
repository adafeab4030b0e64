//! Two process operations that Rust's standard library lacks: tying a child's life to ours, and
//! sending signals.
#![allow(unsafe_code, reason = "prctl in a forked child, and kill")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the child when the thread that starts it ends, even by `kill -9`, and puts
/// the child into its own process group.
pub(super) fn bind_to_us(command: &mut Command) {
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: prctl and getppid are async-signal-safe and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // We may have died before the call above; then no signal would come.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Sends `signal` to the process group of `leader`, a child that has not been waited for. It may
/// have ended already.
pub(super) fn signal_group(leader: u32, signal: i32) {
    if let Ok(leader) = i32::try_from(leader) {
        // SAFETY: no memory is involved.
        unsafe { libc::kill(-leader, signal) };
    }
}
