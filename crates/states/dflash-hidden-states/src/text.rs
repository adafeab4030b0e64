//! Makes text from servers and files safe for a terminal.
//!
//! A server's answer is quoted in errors and log lines. It must not control the terminal or fill
//! it, and passwords of endpoints must not be shown.

/// `text` on one line, without characters that control terminals, cut to `longest` characters.
pub(crate) fn clean(text: &str, longest: usize) -> String {
    // The rest is not processed: it may be long.
    let mut shown: String = text.chars().take(longest + 1).map(visible).collect();
    if shown.chars().count() > longest {
        shown = shown.chars().take(longest).collect();
        shown.push_str("...");
    }
    shown.trim().to_owned()
}

/// Control characters end or control a line; some invisible characters change its direction.
fn visible(c: char) -> char {
    match c {
        '\t' | '\n' | '\r' => ' ',
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{2069}'
        | '\u{feff}' => char::REPLACEMENT_CHARACTER,
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_get_short_plain_text() {
        assert_eq!(clean(" two\r\nlines\t", 40), "two  lines");
        assert_eq!(clean("\u{1b}]0;title\u{7}\u{9b}2J", 40), "\u{fffd}]0;title\u{fffd}\u{fffd}2J");
        assert_eq!(clean("a\u{202e}b", 40), "a\u{fffd}b");
        assert_eq!(clean("größer", 4), "größ...");
        assert_eq!(clean(&"x".repeat(20 << 20), 200).len(), 203);
    }
}
