//! Text from servers and files on its way to a terminal.
//!
//! A server's answer is quoted in errors and log lines. What it says must neither steer the terminal
//! nor fill it, and the passwords of endpoints stay with us.

/// `text` on one line, without characters that terminals act on, cut to `longest` characters.
pub(crate) fn clean(text: &str, longest: usize) -> String {
    // What is cut off is not looked at: it may be long.
    let mut shown: String = text.chars().take(longest + 1).map(visible).collect();
    if shown.chars().count() > longest {
        shown = shown.chars().take(longest).collect();
        shown.push_str("...");
    }
    shown.trim().to_owned()
}

/// Control characters end or steer a line; the invisible ones beside them turn its direction.
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
