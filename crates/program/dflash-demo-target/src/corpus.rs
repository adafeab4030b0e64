//! The synthetic corpus: short conversations whose answers can be derived from their questions.
//!
//! Numbers stay small, answers are worked out in steps, and wording varies a little, so that a
//! model of two million weights learns the form in a few hundred steps and still makes mistakes.

use dflash_chat::{Message, Role};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

mod chat;
mod problems;
mod words;

/// A question and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) question: String,
    pub(crate) answer: String,
}

/// The random number generator of all choices.
type Random = ChaCha8Rng;

/// Probability of a second turn.
const SECOND_TURN: f64 = 1.0 / 3.0;

/// `count` conversations, determined by `seed`.
pub(crate) fn conversations(count: usize, seed: u64) -> Vec<Vec<Exchange>> {
    let mut random = Random::seed_from_u64(seed);
    (0..count).map(|_| conversation(&mut random)).collect()
}

fn conversation(random: &mut Random) -> Vec<Exchange> {
    let mut turns = vec![exchange(random)];
    if random.random_bool(SECOND_TURN) {
        turns.push(exchange(random));
    }
    turns
}

fn exchange(random: &mut Random) -> Exchange {
    let kinds = [problems::KINDS, chat::KINDS].concat();
    kinds.choose(random).expect("there are kinds")(random)
}

pub(crate) fn messages(turns: &[Exchange]) -> Vec<Message> {
    let pair = |turn: &Exchange| {
        [(Role::User, &turn.question), (Role::Assistant, &turn.answer)]
            .map(|(role, text)| Message::text(role, text.as_str()))
    };
    turns.iter().flat_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_seed_decides_everything() {
        assert_eq!(conversations(20, 3), conversations(20, 3));
        assert_ne!(conversations(20, 3), conversations(20, 4));
        assert_eq!(conversations(20, 3)[..5], conversations(5, 3)[..]);
    }

    #[test]
    fn questions_hardly_repeat() {
        let all = conversations(1000, 0);
        let distinct: HashSet<_> = all.iter().map(|turns| &turns[0].question).collect();
        assert!(distinct.len() > 850, "{}", distinct.len());
    }

    #[test]
    fn some_conversations_have_two_turns() {
        let two = conversations(300, 1).iter().filter(|turns| turns.len() == 2).count();
        assert!((60..140).contains(&two), "{two}");
    }

    #[test]
    fn roles_alternate() {
        let turns = &conversations(50, 2).into_iter().find(|turns| turns.len() == 2).unwrap();
        let roles: Vec<_> = messages(turns).iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::User, Role::Assistant]);
    }
}
