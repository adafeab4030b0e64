//! Rows of every layout, as datasets have them.

use serde_json::json;

use super::*;

fn conversation(row: &Value) -> Conversation {
    match parse_row(row).unwrap() {
        Row::Conversation(conversation) => conversation,
        Row::Tokenized { .. } => panic!("{row} was taken for a tokenized row"),
    }
}

/// Compares `role: content` of every turn, joined by ` | `.
fn check(row: Value, expect: &str) {
    let found: Vec<String> = conversation(&row)
        .messages
        .iter()
        .map(|m| format!("{:?}: {}", m.role, m.content.as_str().unwrap_or("-")))
        .collect();
    assert_eq!(found.join(" | "), expect, "{row}");
}

fn check_error(row: Value, expect: &str) {
    let error = parse_row(&row).unwrap_err().to_string();
    assert!(error.contains(expect), "{row}: {error}");
}

#[test]
fn every_layout_is_recognised() {
    let expect = "User: q | Assistant: a";
    let turns = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
    check(json!({"id": "x", "conversations": turns}), expect);
    check(json!({"question": "q", "answer": "a"}), expect);
    check(json!({"messages": null, "question": "q", "answer": "a"}), expect);
    check(json!({"prompt": "q", "completion": "a"}), expect);
    check(json!({"query": "q", "response": "a"}), expect);
    check(json!({"instruction": "q", "response": "a"}), expect);
    check(json!({"instruction": "q", "input": "", "output": "a"}), expect);
    check(json!({"instruction": "q", "input": "i", "output": "a"}), "User: q\ni | Assistant: a");
    check(json!({"problem": "q", "solution": "a", "answer": "4"}), expect);
    check(json!({"turns": ["one", "two"], "question_id": 1}), "User: one | User: two");
    let with_system = json!({"system": "s", "question": "q", "answer": "a"});
    check(with_system, "System: s | User: q | Assistant: a");
    // OpenOrca, Nemotron and Dolly.
    let orca = json!({"id": "niv.1", "system_prompt": "s", "question": "q", "response": "a"});
    check(orca, "System: s | User: q | Assistant: a");
    let user = json!([{"role": "user", "content": "q"}]);
    let nemotron = json!({"input": user, "output": "a", "system_prompt": "s", "category": "c"});
    check(nemotron, "System: s | User: q | Assistant: a");
    let dolly = json!({"instruction": "q", "context": "c", "response": "a", "category": "qa"});
    check(dolly, "User: q\nc | Assistant: a");
    check(json!({"instruction": "q", "context": "", "response": "a"}), expect);
    check(json!({"question": "q", "context": "c", "answer": "a"}), expect);
}

#[test]
fn columns_that_nothing_reads_are_named() {
    let check = |row: Value, expect: &[&str]| {
        let mut found = unread_columns(&row);
        found.sort_unstable();
        assert_eq!(found, expect, "{row}");
        let is_known = |name: &&String| !expect.contains(&name.as_str()) && !row[*name].is_null();
        let read = row.as_object().unwrap().keys().filter(is_known);
        read.for_each(|name| assert!(is_row_column(name), "{name}"));
    };
    let turns = json!([{"role": "user", "content": "q"}]);
    check(json!({"messages": turns, "tools": "[]", "system": "s"}), &[]);
    check(json!({"messages": turns, "prompt": "q", "id": 1, "note": null}), &["id", "prompt"]);
    check(json!({"question": "q", "context": "c", "answer": "a"}), &["context"]);
    check(json!({"instruction": "q", "context": "c", "response": "a", "input": "i"}), &[]);
    check(
        json!({"system": "s", "system_prompt": "t", "query": "q", "response": "a"}),
        &["system_prompt"],
    );
    // A system prompt among the turns wins over the column.
    let own = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]);
    check(json!({"messages": own, "system": "s"}), &[]);
    check(json!({"messages": own, "system": "t"}), &["system"]);
    check(json!({"prompt": own, "completion": "a", "system_prompt": "t"}), &["system_prompt"]);
    let parts = json!([{"from": "system", "value": [{"type": "text", "text": "s"}]}]);
    check(json!({"conversations": parts, "system_prompt": "t"}), &["system_prompt"]);
    check(json!({"problem": "q", "solution": "a", "answer": "4"}), &["answer"]);
    check(json!({"turns": ["a"], "reference": ["b"]}), &["reference"]);
    check(json!({"input_ids": [1], "loss_mask": [1], "messages": turns}), &[]);
    assert!(unread_columns(&json!({"text": "x"})).is_empty());
    assert!(unread_columns(&json!([1])).is_empty());
    let question = json!({"question": "q", "context": "c", "id": 1});
    assert!(unread_columns(&question).is_empty(), "it is refused for want of an answer");
    assert_eq!(unread_prompt_columns(&question), ["context", "id"]);
}

#[test]
fn either_side_of_a_pair_may_be_a_list_of_turns() {
    let user = json!({"role": "user", "content": "q"});
    check(json!({"input": [user], "output": "a"}), "User: q | Assistant: a");
    let prompt = json!([{"role": "system", "content": "s"}, user]);
    let completion = json!([{"role": "assistant", "content": "a"}]);
    let both = json!({"prompt": prompt, "completion": completion});
    check(both, "System: s | User: q | Assistant: a");
}

#[test]
fn a_list_of_turns_wins_over_columns_beside_it() {
    let turns = json!([{"from": "human", "value": "q"}]);
    let row = json!({"instruction": "i", "response": "r", "system": "s", "conversations": turns});
    check(row, "System: s | User: q");
    let turns = json!([{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]);
    check(json!({"prompt": "ignored", "messages": turns}), "System: own | User: q");
    check(json!({"system": "s", "messages": turns}), "System: own | User: q");
}

#[test]
fn pre_tokenized_columns_win() {
    let check = |row: Value, input_ids: Vec<i64>, loss_mask: Vec<bool>| {
        assert_eq!(parse_row(&row).unwrap(), Row::Tokenized { input_ids, loss_mask });
    };
    let row = json!({"question": "q", "answer": "a", "input_ids": [5, 6], "loss_mask": [0, 1]});
    check(row, vec![5, 6], vec![false, true]);
    check(json!({"input_ids": [5], "loss_mask": [true]}), vec![5], vec![true]);
    check_error(json!({"input_ids": [1], "loss_mask": []}), "1 entries but loss_mask has 0");
    check_error(json!({"input_ids": [-1], "loss_mask": [1]}), "must be a token id");
    check_error(json!({"input_ids": [1], "loss_mask": [2]}), "must be 0 or 1");
}

#[test]
fn tools_and_reasoning_are_kept() {
    let call = json!([{"function": {"name": "f", "arguments": "{}"}}]);
    let conversation = conversation(&json!({
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": null, "tool_calls": call, "thinking": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "assistant", "content": "a", "tool_calls": []}],
        "tools": "[{\"name\": \"f\"}]"
    }));
    assert_eq!(conversation.tools, Some(json!([{"name": "f"}])));
    let turns = &conversation.messages;
    assert_eq!((&turns[1].content, &turns[1].tool_calls), (&Value::Null, &Some(call)));
    assert_eq!(turns[1].reasoning_content.as_deref(), Some("hm"));
    assert_eq!(turns[2].tool_call_id.as_deref(), Some("c"));
    assert_eq!(turns[3].tool_calls, None);
}

#[test]
fn content_may_be_missing_or_in_parts() {
    let parts = json!([{"type": "text", "text": "q"}]);
    let conversation = conversation(&json!({"messages": [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": null},
        {"role": "assistant", "content": ""},
        {"from": "gpt"}]}));
    let contents: Vec<&Value> = conversation.messages.iter().map(|m| &m.content).collect();
    assert_eq!(contents, [&parts, &Value::Null, &json!(""), &Value::Null]);
    let number = json!([{"role": "user", "content": 5}]);
    check_error(json!({"messages": number}), "content must be a string");
}

#[test]
fn keys_that_nothing_reads_are_named() {
    let turns = json!([
        {"role": "user", "contnt": "q", "mood": 1, "refusal": null},
        {"from": "gpt", "value": "a"}]);
    let messages = conversation(&json!({"conversations": turns, "id": 1})).messages;
    assert_eq!(messages[0].unknown_keys, ["contnt", "mood"]);
    assert!(messages[1].unknown_keys.is_empty());
}

#[test]
fn blank_reasoning_is_none() {
    let reasoning = |turn: Value| {
        let row = json!({"messages": [turn]});
        conversation(&row).messages[0].reasoning_content.clone()
    };
    let blank = json!({"role": "assistant", "content": "a", "reasoning_content": "\n "});
    assert_eq!(reasoning(blank), None);
    let second = json!({"role": "assistant", "reasoning_content": "", "thinking": " hm"});
    assert_eq!(reasoning(second).as_deref(), Some(" hm"));
    let wrong = json!({"role": "assistant", "content": "a", "reasoning": {"text": "x"}});
    check_error(json!({"messages": [wrong]}), "messages[].reasoning must be a string");
}

#[test]
fn ids_may_be_numbers_and_calls_a_string_of_json() {
    let turn = json!({"role": "tool", "tool_call_id": 5, "name": null,
        "tool_calls": "[{\"name\": \"f\"}]"});
    let message = conversation(&json!({"messages": [turn]})).messages.remove(0);
    assert_eq!((message.tool_call_id.as_deref(), message.name), (Some("5"), None));
    assert_eq!(message.tool_calls, Some(json!([{"name": "f"}])));
    let call = json!({"role": "assistant", "tool_calls": {"name": "f"}});
    check_error(json!({"messages": [call]}), "messages[].tool_calls must be a list");
    let name = json!({"role": "user", "content": "q", "name": ["n"]});
    check_error(json!({"messages": [name]}), "messages[].name must be a string");
}

#[test]
fn a_question_alone_is_a_prompt() {
    let check = |row: Value, expect: &str| {
        let Row::Conversation(found) = parse_prompt_row(&row).unwrap() else { panic!("{row}") };
        let texts: Vec<&str> = found.messages.iter().filter_map(|m| m.content.as_str()).collect();
        assert_eq!(texts.join(" | "), expect, "{row}");
    };
    check(json!({"question": "q"}), "q");
    check(json!({"question": "q", "answer": null}), "q");
    check(json!({"question": "q", "answer": "a"}), "q | a");
    check(json!({"instruction": "q", "input": "i"}), "q\ni");
    check(json!({"prompt": "q", "system": "s"}), "s | q");
    check(json!({"prompt": [{"role": "user", "content": "q"}]}), "q");
    check(json!({"prompt": "ignored", "turns": ["a", "b"]}), "a | b");
    check_error(json!({"question": "q", "answre": "a"}), "fields [question, answre]");
    assert!(parse_prompt_row(&json!({"text": "q"})).is_err());
}

#[test]
fn tools_may_be_empty_in_many_ways() {
    for tools in [json!(null), json!([]), json!(""), json!("  "), json!("null"), json!("[]")] {
        let row = json!({"messages": [], "tools": tools});
        assert_eq!(conversation(&row).tools, None, "{row}");
    }
}

#[test]
fn a_wrong_row_says_what_is_wrong() {
    check_error(json!([1]), "must be a JSON object, found an array");
    check_error(json!({"text": "x", "url": "y"}), "fields [text, url]");
    check_error(json!({"messages": "x"}), "messages must be an array");
    check_error(json!({"messages": ["q"]}), "messages[] must be an object");
    check_error(json!({"messages": [{"content": "q"}]}), "messages[].role must be a string");
    check_error(json!({"messages": [{"role": "alien", "content": ""}]}), "\"alien\"");
    check_error(json!({"question": "q", "answer": 4}), "answer must be a string");
    check_error(json!({"messages": [], "tools": "{"}), "tools must be a list or a string");
    check_error(json!({"messages": [], "tools": {"a": 1}}), "found an object");
}
