//! The words that conversations are filled with.

use rand::seq::IndexedRandom;

use super::Random;

const NAMES: &[&str] = &[
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin",
    "Liam", "Maya", "Noah", "Olga", "Paul",
];
const GOODS: &[(&str, &str)] = &[
    ("apple", "apples"),
    ("book", "books"),
    ("candle", "candles"),
    ("lemon", "lemons"),
    ("marble", "marbles"),
    ("notebook", "notebooks"),
    ("pencil", "pencils"),
    ("ribbon", "ribbons"),
    ("sticker", "stickers"),
    ("ticket", "tickets"),
];
const CITIES: &[&str] =
    &["Bergen", "Cairo", "Dublin", "Geneva", "Kyoto", "Lima", "Lisbon", "Oslo", "Quito", "Turin"];
const WEEKDAYS: &[&str] =
    &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

pub(super) fn name(random: &mut Random) -> &'static str {
    NAMES.choose(random).expect("names")
}

/// Two different names.
pub(super) fn two_names(random: &mut Random) -> [&'static str; 2] {
    let mut both = NAMES.choose_multiple(random, 2).copied();
    [both.next().expect("names"), both.next().expect("names")]
}

/// Two different goods, in the plural.
pub(super) fn two_goods(random: &mut Random) -> [&'static str; 2] {
    let mut both = GOODS.choose_multiple(random, 2).map(|good| good.1);
    [both.next().expect("goods"), both.next().expect("goods")]
}

/// One good: singular and plural.
pub(super) fn good(random: &mut Random) -> (&'static str, &'static str) {
    *GOODS.choose(random).expect("goods")
}

/// Two different cities.
pub(super) fn two_cities(random: &mut Random) -> [&'static str; 2] {
    let mut both = CITIES.choose_multiple(random, 2).copied();
    [both.next().expect("cities"), both.next().expect("cities")]
}

/// A day of the week and its number from Monday = 0.
pub(super) fn weekday(random: &mut Random) -> usize {
    let days: Vec<usize> = (0..WEEKDAYS.len()).collect();
    *days.choose(random).expect("days")
}

/// The name of a day, counted from Monday = 0 and around.
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
            let [a, b] = two_names(&mut random);
            let [c, d] = two_goods(&mut random);
            let [e, f] = two_cities(&mut random);
            assert!(a != b && c != d && e != f);
        }
    }

    #[test]
    fn days_go_around() {
        assert_eq!((day_name(0), day_name(6), day_name(7)), ("Monday", "Sunday", "Monday"));
    }
}
