//! Word problems, each worked out in steps.

use rand::Rng;

use super::words::{CITIES, GOODS, NAMES, goods, name, two_of};
use super::{Exchange, Random};

/// Every kind of problem.
pub(super) const KINDS: &[fn(&mut Random) -> Exchange] =
    &[shopping, sharing, travelling, saving, reading, planting, comparing, baking];

/// Small enough that the products of two can be learned by heart.
fn small(random: &mut Random) -> u32 {
    random.random_range(2..=9)
}

fn shopping(random: &mut Random) -> Exchange {
    let (who, [first, second]) = (name(random), two_of(GOODS, random));
    let (a, p, b, q) = (small(random), small(random), small(random), small(random));
    let (one, two) = (a * p, b * q);
    Exchange {
        question: format!(
            "{who} buys {a} {first} at {p} dollars each and {b} {second} at {q} dollars each. \
             How many dollars does {who} spend?"
        ),
        answer: format!(
            "The {first} cost {a} times {p}, which is {one} dollars.\n\
             The {second} cost {b} times {q}, which is {two} dollars.\n\
             Together that is {one} plus {two}, which is {total} dollars.\n\
             {who} spends {total} dollars in total.\n#### {total}",
            total = one + two
        ),
    }
}

fn sharing(random: &mut Random) -> Exchange {
    let (who, goods) = (name(random), goods(random));
    let (friends, each, left) = (small(random), small(random), random.random_range(1..=9));
    let total = friends * each + left;
    Exchange {
        question: format!(
            "{who} has {total} {goods} and gives {each} {goods} to each of {friends} friends. \
             How many {goods} are left?"
        ),
        answer: format!(
            "{who} gives away {friends} times {each}, which is {given} {goods}.\n\
             What is left is {total} minus {given}, which is {left} {goods}.\n\
             So {who} has {left} {goods} left.\n#### {left}",
            given = friends * each
        ),
    }
}

fn travelling(random: &mut Random) -> Exchange {
    let (who, [from, to]) = (name(random), two_of(CITIES, random));
    let (hours, speed) = (small(random), 10 * small(random));
    Exchange {
        question: format!(
            "{who} travels from {from} to {to} at {speed} miles per hour and needs {hours} hours. \
             How far is it from {from} to {to}?"
        ),
        answer: format!(
            "The distance is the speed times the time.\n\
             The speed is {speed} miles per hour and the time is {hours} hours.\n\
             {speed} times {hours} is {miles} miles.\n\
             It is {miles} miles from {from} to {to}.\n#### {miles}",
            miles = speed * hours
        ),
    }
}

fn saving(random: &mut Random) -> Exchange {
    let who = name(random);
    let (start, weekly, weeks) = (10 * small(random), small(random), small(random));
    let saved = weekly * weeks;
    Exchange {
        question: format!(
            "{who} has {start} dollars and saves {weekly} dollars every week. \
             How many dollars does {who} have after {weeks} weeks?"
        ),
        answer: format!(
            "In {weeks} weeks {who} saves {weeks} times {weekly}, which is {saved} dollars.\n\
             With the {start} dollars from before that is {start} plus {saved}, \
             which is {total} dollars.\n\
             After {weeks} weeks {who} has {total} dollars.\n#### {total}",
            total = start + saved
        ),
    }
}

fn reading(random: &mut Random) -> Exchange {
    let who = name(random);
    let (daily, days, rest) = (small(random), small(random), 10 * small(random));
    let read = daily * days;
    Exchange {
        question: format!(
            "A book has {pages} pages. {who} reads {daily} pages a day for {days} days. \
             How many pages remain?",
            pages = read + rest
        ),
        answer: format!(
            "In {days} days {who} reads {days} times {daily}, which is {read} pages.\n\
             The book has {pages} pages, so {pages} minus {read} pages remain.\n\
             That is {rest} pages.\n#### {rest}",
            pages = read + rest
        ),
    }
}

fn planting(random: &mut Random) -> Exchange {
    let who = name(random);
    let (rows, each, dry) = (small(random), small(random), random.random_range(1..=3));
    let planted = rows * each;
    Exchange {
        question: format!(
            "{who} plants {rows} rows of {each} trees. Then {dry} trees dry out. \
             How many trees grow?"
        ),
        answer: format!(
            "{who} plants {rows} times {each}, which is {planted} trees.\n\
             Of these {dry} dry out, so {planted} minus {dry} trees are left.\n\
             In the end {grown} trees grow.\n#### {grown}",
            grown = planted - dry
        ),
    }
}

fn comparing(random: &mut Random) -> Exchange {
    let ([one, two], goods) = (two_of(NAMES, random), goods(random));
    let (few, factor) = (small(random), random.random_range(2..=4));
    let many = few * factor;
    Exchange {
        question: format!(
            "{one} has {few} {goods}. {two} has {factor} times as many. \
             How many {goods} do they have together?"
        ),
        answer: format!(
            "{two} has {factor} times {few}, which is {many} {goods}.\n\
             Together {one} and {two} have {few} plus {many}, which is {total} {goods}.\n\
             #### {total}",
            total = few + many
        ),
    }
}

fn baking(random: &mut Random) -> Exchange {
    let who = name(random);
    let (cakes, eggs, have) = (small(random), random.random_range(2..=4), small(random));
    let needed = cakes * eggs + have;
    Exchange {
        question: format!(
            "{who} bakes {cakes} cakes. Every cake takes {eggs} eggs, and {have} more eggs go \
             into the cream. How many eggs does {who} need?"
        ),
        answer: format!(
            "The cakes take {cakes} times {eggs}, which is {for_cakes} eggs.\n\
             The cream takes {have} eggs more, so {who} needs {for_cakes} plus {have} eggs.\n\
             That is {needed} eggs.\n#### {needed}",
            for_cakes = cakes * eggs
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    /// The numbers of a text, in order.
    fn numbers(text: &str) -> Vec<i64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    }

    fn check(kind: fn(&mut Random) -> Exchange, expect: fn(&[i64]) -> i64) {
        for seed in 0..20 {
            let made = kind(&mut Random::seed_from_u64(seed));
            let result = *numbers(&made.answer).last().unwrap();
            assert_eq!(result, expect(&numbers(&made.question)), "{made:?}");
        }
    }

    #[test]
    fn answers_are_right() {
        check(shopping, |n| n[0] * n[1] + n[2] * n[3]);
        check(sharing, |n| n[0] - n[1] * n[2]);
        check(travelling, |n| n[0] * n[1]);
        check(saving, |n| n[0] + n[1] * n[2]);
        check(reading, |n| n[0] - n[1] * n[2]);
        check(planting, |n| n[0] * n[1] - n[2]);
        check(comparing, |n| n[0] + n[0] * n[1]);
        check(baking, |n| n[0] * n[1] + n[2]);
    }

    #[test]
    fn every_answer_ends_with_its_result() {
        for kind in KINDS {
            let answer = kind(&mut Random::seed_from_u64(1)).answer;
            let last = answer.lines().last().unwrap();
            assert!(last.starts_with("#### "), "{answer}");
        }
    }
}
