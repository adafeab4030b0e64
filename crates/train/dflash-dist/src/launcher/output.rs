//! Forwards the output of ranks above 0, marked with their rank.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::thread::JoinHandle;

use dflash_io::Stderr;

/// Copies `source` to our standard error, with `[rank N] ` before each line, until it ends.
pub(super) fn forward(rank: usize, source: impl Read + Send + 'static) -> JoinHandle<()> {
    std::thread::spawn(move || {
        // Read to the end even if our standard error is gone, so that the rank can continue
        // writing.
        let _ = copy_marked(rank, BufReader::new(source), &mut Stderr);
    })
}

/// One write per line, so that lines of different ranks do not mix.
fn copy_marked(rank: usize, mut source: impl BufRead, sink: &mut impl Write) -> io::Result<()> {
    let mark = format!("[rank {rank}] ").into_bytes();
    loop {
        let mut line = mark.clone();
        if source.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        sink.write_all(&line)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_marked_and_none_changed() {
        let check = |input: &[u8], expected: &[u8]| {
            let mut output = Vec::new();
            copy_marked(3, input, &mut output).unwrap();
            assert_eq!(output, expected);
        };
        check(b"", b"");
        check(b"one\ntwo\n", b"[rank 3] one\n[rank 3] two\n");
        check(b"cut", b"[rank 3] cut\n");
        check(b"\n\xff\n", b"[rank 3] \n[rank 3] \xff\n");
    }
}
