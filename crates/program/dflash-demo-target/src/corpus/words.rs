//! The words that conversations are filled with.

use rand::seq::IndexedRandom;

use super::Random;

pub(super) const NAMES: &[&str] = &[
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin",
    "Liam", "Maya", "Noah", "Olga", "Paul",
];
pub(super) const GOODS: &[&str] = &[
    "apples",
    "books",
    "candles",
    "lemons",
    "marbles",
    "notebooks",
    "pencils",
    "ribbons",
    "stickers",
    "tickets",
];
pub(super) const CITIES: &[&str] =
    &["Bergen", "Cairo", "Dublin", "Geneva", "Kyoto", "Lima", "Lisbon", "Oslo", "Quito", "Turin"];
const WEEKDAYS: &[&str] =
    &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

pub(super) fn name(random: &mut Random) -> &'static str {
    NAMES.choose(random).expect("names")
}

pub(super) fn goods(random: &mut Random) -> &'static str {
    GOODS.choose(random).expect("goods")
}

/// Two different words.
pub(super) fn two_of(words: &[&'static str], random: &mut Random) -> [&'static str; 2] {
    let mut both = words.choose_multiple(random, 2).copied();
    [both.next().expect("words"), both.next().expect("words")]
}

/// A day of the week, counted from Monday = 0.
pub(super) fn weekday(random: &mut Random) -> usize {
    let days: Vec<usize> = (0..WEEKDAYS.len()).collect();
    *days.choose(random).expect("days")
}

/// The name of a day, counted from Monday = 0 through any number of weeks.
pub(super) fn day_name(day: usize) -> &'static str {
    WEEKDAYS[day % WEEKDAYS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn pairs_differ() {
        let mut random = Random::seed_from_u64(0);
        for _ in 0..50 {
            for words in [NAMES, GOODS, CITIES] {
                let [first, second] = two_of(words, &mut random);
                assert_ne!(first, second);
            }
        }
    }

    #[test]
    fn days_go_around() {
        assert_eq!((day_name(0), day_name(6), day_name(7)), ("Monday", "Sunday", "Monday"));
    }
}
