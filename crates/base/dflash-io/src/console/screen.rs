//! A test terminal that records what is drawn on it.

use std::io;
use std::sync::{Arc, Mutex};

use indicatif::{ProgressDrawTarget, TermLike};

/// Everything written to a terminal of a given width.
#[derive(Clone, Debug)]
pub(crate) struct Screen {
    columns: u16,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Screen {
    pub(crate) fn new(columns: u16) -> Self {
        Self { columns, lines: Arc::default() }
    }

    pub(crate) fn target(&self) -> ProgressDrawTarget {
        ProgressDrawTarget::term_like(Box::new(self.clone()))
    }

    /// All lines drawn so far; checks their width.
    pub(crate) fn lines(&self) -> Vec<String> {
        let lines = self.lines.lock().unwrap().clone();
        for line in &lines {
            assert!(
                line.chars().count() <= self.columns.into(),
                "{} columns: {line}",
                self.columns
            );
        }
        lines
    }

    /// The last line drawn that contains these words.
    pub(crate) fn last_with(&self, words: &str) -> String {
        let lines = self.lines();
        let found = lines.iter().rfind(|line| line.contains(words));
        found.unwrap_or_else(|| panic!("no line has {words:?}: {lines:#?}")).clone()
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        self.columns
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, line: &str) -> io::Result<()> {
        self.write_str(line)
    }

    /// Each line comes in one piece, followed by padding.
    fn write_str(&self, piece: &str) -> io::Result<()> {
        let drawn = piece.split(['\r', '\n']).filter(|line| !line.trim().is_empty());
        self.lines.lock().unwrap().extend(drawn.map(str::to_owned));
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
