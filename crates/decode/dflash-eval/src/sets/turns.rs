//! Which turns of a conversation are questions.

use dflash_chat::{Message, Role};

/// Where the prompt ends, and where the remaining questions end; `None` without a user turn.
///
/// The prompt of a conversation is everything before its last answer; of user turns without answers
/// between them, it is the first one.
pub fn open_turns(messages: &[Message]) -> Option<(usize, usize)> {
    messages.iter().position(|message| message.role == Role::User)?;
    let end = messages.iter().rposition(|message| message.role != Role::Assistant)? + 1;
    let both_user = |pair: &[Message]| pair.iter().all(|message| message.role == Role::User);
    let first = messages[..end].windows(2).position(both_user).map_or(end, |before| before + 1);
    Some((first, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_ends_before_the_last_answer_or_the_first_gap() {
        let check = |roles: &str, expected: Option<(usize, usize)>| {
            let messages: Vec<Message> = roles
                .chars()
                .map(|role| match role {
                    's' => Message::text(Role::System, "s"),
                    'u' => Message::text(Role::User, "u"),
                    't' => Message::text(Role::Tool, "t"),
                    _ => Message::text(Role::Assistant, "a"),
                })
                .collect();
            assert_eq!(open_turns(&messages), expected, "{roles}");
        };
        check("u", Some((1, 1)));
        check("ua", Some((1, 1)));
        check("suau", Some((4, 4)));
        check("suaua", Some((4, 4)));
        check("uu", Some((1, 2)));
        check("uuu", Some((1, 3)));
        check("uat", Some((3, 3)));
        check("a", None);
        check("s", None);
        check("", None);
    }
}
