//! The known word that a mistyped one probably stands for.

/// The word of `known` that is nearest to `word`: one slip of the pen for every three letters at most (a letter
/// wrong, missing, too many, or two exchanged), in any case of letters.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let most = (word.chars().count() / 3).max(1);
    let slips = |other: &str| strsim::damerau_levenshtein(&word, &other.to_lowercase());
    let rated = known.into_iter().map(|other| (slips(other), other));
    rated
        .filter(|(slips, _)| *slips <= most)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, other)| other)
}

/// `; did you mean NAME?` for the nearest word, or nothing.
pub fn did_you_mean<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_finds_its_word_and_another_word_finds_none() {
        let known = ["sharegpt", "ultrachat", "gsm8k", "mbpp", "zsh"];
        let check = |word: &str, expect| assert_eq!(nearest(word, known), expect, "{word}");
        check("sharegtp", Some("sharegpt"));
        check("ShareGPT", Some("sharegpt"));
        check("gsm9k", Some("gsm8k"));
        check("gms8k", Some("gsm8k"));
        check("mbp", Some("mbpp"));
        check("tcsh", None);
        check("wikipedia", None);
        check("", None);
        assert_eq!(did_you_mean("gsm9k", known), "; did you mean gsm8k?");
        assert_eq!(did_you_mean("x", known), "");
    }
}
