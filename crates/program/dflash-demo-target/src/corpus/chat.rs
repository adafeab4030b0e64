//! Small talk with a fixed right answer: dates, directions, lists, introductions.

use rand::Rng;

use super::words::{CITIES, GOODS, day_name, name, two_of, weekday};
use super::{Exchange, Random};

/// Every kind of small talk.
pub(super) const KINDS: &[fn(&mut Random) -> Exchange] = &[days_from_now, counting, letter, list];

fn days_from_now(random: &mut Random) -> Exchange {
    let (today, ahead) = (weekday(random), random.random_range(1..=6));
    let way: Vec<_> = (1..=ahead).map(|step| day_name(today + step)).collect();
    Exchange {
        question: format!(
            "Today is {}. Which day is it in {ahead} days, and what will {} do then?",
            day_name(today),
            name(random)
        ),
        answer: format!(
            "Let us count from {}: {}.\nSo in {ahead} days it is {}. \
             I cannot know what anybody will do then.",
            day_name(today),
            way.join(", "),
            day_name(today + ahead)
        ),
    }
}

fn counting(random: &mut Random) -> Exchange {
    let (start, step) = (random.random_range(1..=20_u32), random.random_range(2..=9));
    let numbers: Vec<_> = (0..8).map(|k| (start + k * step).to_string()).collect();
    Exchange {
        question: format!("Count from {start} in steps of {step} and give me eight numbers."),
        answer: format!(
            "Here are eight numbers from {start} in steps of {step}:\n{}.",
            numbers.join(", ")
        ),
    }
}

fn letter(random: &mut Random) -> Exchange {
    let (who, [from, to]) = (name(random), two_of(CITIES, random));
    Exchange {
        question: format!(
            "Write a short note to {who}, who is moving from {from} to {to}, and wish all the best."
        ),
        answer: format!(
            "Dear {who},\nI hear that you are moving from {from} to {to}. {from} will miss you, \
             and I am sure that {to} will welcome you.\nI wish you all the best for the new start \
             in {to}. Write to me when you are there.\nYours, a friend from {from}"
        ),
    }
}

fn list(random: &mut Random) -> Exchange {
    let ([first, second], who) = (two_of(GOODS, random), name(random));
    let (a, b) = (random.random_range(2..=40_u32), random.random_range(2..=40_u32));
    let (more, fewer) = if a >= b { (first, second) } else { (second, first) };
    Exchange {
        question: format!(
            "{who} packs {a} {first} and {b} {second}. Make a list and tell me which are more."
        ),
        answer: format!(
            "Here is the list that {who} needs:\n1. {first}: {a}\n2. {second}: {b}\n\
             There are at least as many {more} as {fewer}. The list has two lines."
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn made(kind: fn(&mut Random) -> Exchange, seed: u64) -> Exchange {
        kind(&mut Random::seed_from_u64(seed))
    }

    #[test]
    fn days_are_counted_one_by_one() {
        for seed in 0..20 {
            let made = made(days_from_now, seed);
            let counted = made.answer.lines().next().unwrap().matches("day,").count() + 1;
            assert!(made.question.contains(&format!("in {counted} days")), "{made:?}");
        }
    }

    #[test]
    fn counting_keeps_its_step() {
        let made = made(counting, 5);
        let line = made.answer.lines().last().unwrap().trim_end_matches('.');
        let numbers: Vec<u32> = line.split(", ").map(|n| n.parse().unwrap()).collect();
        assert_eq!(numbers.len(), 8);
        assert!(numbers.windows(2).all(|pair| pair[1] - pair[0] == numbers[1] - numbers[0]));
    }

    #[test]
    fn the_list_names_the_larger_pile() {
        for seed in 0..20 {
            let made = made(list, seed);
            let pile = |line: usize| {
                let line = made.answer.lines().nth(line).unwrap();
                let (goods, count) = line[3..].split_once(": ").unwrap();
                (count.parse::<u32>().unwrap(), goods)
            };
            let larger = if pile(1).0 >= pile(2).0 { pile(1).1 } else { pile(2).1 };
            assert!(made.answer.contains(&format!("as many {larger} as")), "{made:?}");
        }
    }

    #[test]
    fn the_note_speaks_of_both_cities() {
        let made = made(letter, 2);
        assert_eq!(made.answer.lines().count(), 4, "{made:?}");
        assert!(made.answer.starts_with("Dear "));
    }
}
