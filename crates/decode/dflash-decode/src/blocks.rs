//! Display of a block's accepted and rejected parts.

/// Colors, or wdiff marks without color support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Marks {
    pub(crate) colored: bool,
}

impl Marks {
    /// Green, or `{+text+}`.
    pub(crate) fn accepted(self, text: &str) -> String {
        self.around(text, &GREEN, &ADDED)
    }

    /// Red and struck through, or `[-text-]`; on one line, being outside the text.
    pub(crate) fn rejected(self, text: &str) -> String {
        let on_one_line = |letter: char| match letter {
            '\n' => '\u{21b5}',
            '\t' => '\u{21e5}',
            letter if letter.is_control() => char::REPLACEMENT_CHARACTER,
            letter => letter,
        };
        let text: String = text.chars().map(on_one_line).collect();
        self.around(&text, &STRUCK_OUT, &REMOVED)
    }

    fn around(self, text: &str, colored: &Delimiters, plain: &Delimiters) -> String {
        let Delimiters { before, after } = if self.colored { colored } else { plain };
        if text.is_empty() { String::new() } else { format!("{before}{text}{after}") }
    }
}

/// What marks a part of a line on both sides.
struct Delimiters {
    before: &'static str,
    after: &'static str,
}

const GREEN: Delimiters = Delimiters { before: "\x1b[32m", after: "\x1b[0m" };
const STRUCK_OUT: Delimiters = Delimiters { before: "\x1b[31;9m", after: "\x1b[0m" };
const ADDED: Delimiters = Delimiters { before: "{+", after: "+}" };
const REMOVED: Delimiters = Delimiters { before: "[-", after: "-]" };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_apart_with_and_without_colors() {
        let check = |colored, expect: &str| {
            let marks = Marks { colored };
            let shown = [marks.accepted("a"), marks.rejected("b"), marks.rejected("")].concat();
            assert_eq!(shown, expect);
        };
        check(false, "{+a+}[-b-]");
        let rejected = Marks { colored: false }.rejected("a\nb\tc\r\x1b[2J");
        assert_eq!(rejected, "[-a\u{21b5}b\u{21e5}c\u{fffd}\u{fffd}[2J-]");
        check(true, "\x1b[32ma\x1b[0m\x1b[31;9mb\x1b[0m");
    }
}
