//! Recognises answers in which the target repeats itself.
//!
//! A barely trained model, or one with a wrong chat template, answers with one token or a short cycle for
//! hundreds of tokens. Any drafter predicts such text, so its acceptance length is near the size of a block
//! and says nothing about text that people ask for.

use std::collections::HashSet;
use std::hash::Hash;

/// Shorter answers are not judged: "yes yes" is not a loop.
const SHORTEST: usize = 8;
/// Of shorter answers than this nearly all must be a loop: "100000" is half of one that says it.
const LONG: usize = 16;
/// Longest cycle that is looked for: a paragraph.
const LONGEST_CYCLE: usize = 128;
/// Times that a cycle must be seen in a row.
const TIMES: usize = 3;
/// Tokens of a window in which distinct ones are counted.
const WINDOW: usize = 32;
/// A window with fewer distinct tokens than one in so many is poor. Solutions of GSM8K have 14 or more in
/// every window of 32; babble of "is is times, which is times" has 5.
const POOR: usize = 4;

/// Whether at least half of `tokens` is one cycle of up to 128 tokens, three times or more in a row, or
/// more than half of its windows of 32 tokens have fewer than 8 distinct ones. Of fewer than 16 tokens all
/// but one must be the cycle; answers of fewer than 8 do not repeat themselves.
pub fn repeats<T: Eq + Hash>(tokens: &[T]) -> bool {
    match tokens.len() {
        0..SHORTEST => false,
        length @ SHORTEST..LONG => has_cycle(tokens, length - 1),
        length => has_cycle(tokens, length.div_ceil(2)) || is_poor(tokens),
    }
}

/// The same of a text whose tokens are not known: words and single signs stand for them.
pub(crate) fn text_repeats(text: &str) -> bool {
    repeats(&pieces(text))
}

/// Whether one cycle covers `enough` tokens in a row.
fn has_cycle<T: Eq>(tokens: &[T], enough: usize) -> bool {
    let covered = |period: usize| {
        let (mut run, mut covered) = (0, 0);
        for at in period..tokens.len() {
            run = if tokens[at] == tokens[at - period] { run + 1 } else { 0 };
            if run >= (TIMES - 1) * period {
                covered = covered.max(run + period);
            }
        }
        covered
    };
    (1..=LONGEST_CYCLE).any(|period| covered(period) >= enough)
}

fn is_poor<T: Eq + Hash>(tokens: &[T]) -> bool {
    let windows: Vec<&[T]> = tokens.windows(WINDOW.min(tokens.len())).collect();
    let poor = |window: &&&[T]| window.iter().collect::<HashSet<_>>().len() * POOR < window.len();
    2 * windows.iter().filter(poor).count() > windows.len()
}

/// Words, and every sign that belongs to none; blanks are left out, line breaks are not.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut word = None;
    for (at, sign) in text.char_indices() {
        if sign.is_alphanumeric() {
            word.get_or_insert(at);
            continue;
        }
        pieces.extend(word.take().map(|start| &text[start..at]));
        if sign != ' ' {
            pieces.push(&text[at..at + sign.len_utf8()]);
        }
    }
    pieces.extend(word.map(|start| &text[start..]));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: bool) {
        assert_eq!(text_repeats(text), expect, "{text:?}");
    }

    #[test]
    fn loops_are_found_and_sentences_are_not() {
        check(&"\n".repeat(32), true);
        check(&"I am not sure what you mean. ".repeat(8), true);
        check(
            "The times, which is times, which is is is times, which is is is times, which is times, which is times, is is",
            true,
        );
        let paragraph: String = (0..60).map(|word| format!("word{word} ")).collect();
        check(&paragraph.repeat(5), true);
        check(&paragraph.repeat(2), false);
        check("The answer is 1 0 0 0 0 0", false);
        // Half of it is the loop.
        check(
            &format!(
                "He buys 3 apples and pays 4 dollars for each, so that is{}",
                " 1 2".repeat(10)
            ),
            true,
        );
        check("\n\n\n", false);
        check("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20", false);
        check(
            "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips \
             altogether in April and May.\n#### 72",
            false,
        );
        check(
            "| name | age |\n|---|---|\n| Ann | 31 |\n| Bert | 47 |\n| Carla | 29 |\n\nAnn is older than \
             Carla, and Bert is the oldest of the three of them.",
            false,
        );
    }

    #[test]
    fn a_long_answer_is_judged_by_its_windows_and_not_by_its_length() {
        // As many distinct tokens in 3,000 as a long solution has: a tenth.
        let varied: Vec<usize> = (0..3000).map(|at| (at * at + at / 7) % 300).collect();
        assert!(!repeats(&varied));
        let mut half = varied[..1000].to_vec();
        half.extend(std::iter::repeat_n(5, 1001));
        assert!(repeats(&half));
        assert!(!repeats(&half[..1500]));
    }

    #[test]
    fn short_answers_are_not_judged() {
        assert!(!repeats(&[7; SHORTEST - 1]));
        assert!(repeats(&[7; SHORTEST]));
    }
}
