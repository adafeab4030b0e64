//! Tool calls: requested and answered.

use std::path::Path;

use dflash_test_support::byte_tokenizer;
use serde_json::{Value, json};

use crate::running::{Running, chat_body, ok, refusal, settings};

const CHAT: &str = "/v1/chat/completions";

/// A template that formats a call according to `call`.
fn template(call: &str) -> String {
    let head = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
                {% for c in m.tool_calls or [] %}";
    let tail =
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    format!("{head}{call}{tail}")
}

const HERMES: &str = "<tool_call>\n{\"name\": \"{{ c.function.name }}\", \
    \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>";
const LLAMA: &str =
    "{\"name\": \"{{ c.function.name }}\", \"parameters\": {{ c.function.arguments | tojson }}}";
const MISTRAL: &str = "[TOOL_CALLS][{\"name\": \"{{ c.function.name }}\", \
    \"arguments\": {{ c.function.arguments | tojson }}}]";
const TAGS: &str = "<tool_call>\n<function={{ c.function.name }}>\n{% for k in c.function.arguments %}\
    <parameter={{ k }}>\n{{ c.function.arguments[k] }}\n</parameter>\n{% endfor %}</function>\n</tool_call>";

fn server(call: &str) -> Running {
    Running::start_with(settings(), |target: &Path| {
        std::fs::write(target.join("chat_template.jinja"), template(call)).unwrap();
        // Mistral's marker is a token without text.
        let json = byte_tokenizer(&["<|end|>", "[TOOL_CALLS]"]).to_string();
        std::fs::write(target.join("tokenizer.json"), json).unwrap();
    })
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"], "additionalProperties": false});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Prevents the endless whitespace of a random model.
fn no_blanks() -> Value {
    json!({"9": -100, "10": -100, "13": -100, "32": -100})
}

fn check_call(call: &Value, names: &[&str]) {
    assert_eq!((&call["type"], call["id"].as_str().unwrap().len()), (&json!("function"), 9));
    assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
    let arguments = call["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(arguments == json!({"city": "Oslo"}) || arguments == json!({"city": "Rome"}), "{call}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_has_to_be_is_made_whole_and_in_pieces() {
    for call in [HERMES, LLAMA, MISTRAL] {
        let server = server(call);
        let more = json!({"tools": [tool("a"), tool("b")], "tool_choice": named("b"),
            "temperature": 0, "logit_bias": no_blanks()});
        let reply = server.chat("go", more.clone()).await;
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert!(choice["message"]["content"].is_null(), "{choice}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "{choice}");
        check_call(&calls[0], &["b"]);
        let mut plain = more.clone();
        plain["speculative"] = json!(false);
        let plain = server.chat("go", plain).await;
        let function =
            |reply: &Value| reply["choices"][0]["message"]["tool_calls"][0]["function"].clone();
        assert_eq!(function(&plain), function(&reply));
        let events = server.stream(CHAT, chat_body("go", more)).await;
        let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
        assert!(
            deltas.iter().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty())
        );
        let pieces: Vec<&Value> =
            deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
        assert_eq!((pieces.len(), &pieces[0]["function"]["name"]), (2, &json!("b")));
        assert_eq!(pieces[1]["function"]["arguments"], function(&reply)["arguments"]);
        assert!(pieces.iter().all(|piece| piece["index"] == 0) && pieces[0]["id"].is_string());
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
        let required = json!({"tools": [tool("a"), tool("b")], "tool_choice": "required", "n": 3,
            "parallel_tool_calls": false, "temperature": 0.8, "seed": 1, "logit_bias": no_blanks()});
        for choice in server.chat("go", required).await["choices"].as_array().unwrap() {
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{choice}");
            check_call(&calls[0], &["a", "b"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_calls_may_have_to_be_made() {
    let server = server(HERMES);
    // Favours a newline before another call over the end.
    let mut bias = no_blanks();
    bias["10"] = json!(-50);
    bias["256"] = json!(-100);
    let more = json!({"tools": [tool("a")], "tool_choice": "required", "temperature": 0,
        "logit_bias": bias, "max_tokens": 250});
    let reply = server.chat("go", more).await;
    let choice = &reply["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{choice}"));
    assert!(calls.len() > 1, "{choice}");
    calls.iter().for_each(|call| check_call(call, &["a"]));
    let ids: std::collections::BTreeSet<&str> =
        calls.iter().map(|call| call["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), calls.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_calls_nothing_is_text() {
    let server = server(HERMES);
    let more = json!({"tools": [tool("a")], "temperature": 0, "max_tokens": 30});
    let reply = server.chat("hello", more.clone()).await;
    let choice = &reply["choices"][0];
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    let text = choice["message"]["content"].as_str().unwrap();
    let events = server.stream(CHAT, chat_body("hello", more)).await;
    let pieces = events.iter().map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap());
    assert_eq!(pieces.collect::<String>(), text);
    // The template sees the tools, unless no call is allowed.
    let prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    let without = server.chat("hello", json!({"max_tokens": 1})).await;
    let none = json!({"max_tokens": 1, "tools": [tool("a")], "tool_choice": "none"});
    assert_eq!(prompt(&server.chat("hello", none).await), prompt(&without));
    assert!(prompt(&reply) > prompt(&without) + 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn earlier_calls_and_their_results_are_shown_to_the_template() {
    let server = server(HERMES);
    let ask = async |arguments: Value| {
        let call = json!({"id": "abcdefghi", "type": "function",
            "function": {"name": "a", "arguments": arguments}});
        let body = json!({"max_tokens": 1, "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
        ]});
        server.post(CHAT, &body).send().await.unwrap()
    };
    let prompt = |reply: Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    let text = prompt(ok(ask(json!("{\"city\": \"Oslo\"}")).await).await);
    // Written as an object, and not as a quoted string.
    assert_eq!(prompt(ok(ask(json!({"city": "Oslo"})).await).await), text);
    let expected = "user: hi.assistant: <tool_call>\n{\"name\": \"a\", \"arguments\": {\"city\": \"Oslo\"}}\n\
                    </tool_call>.tool: sunny.assistant: ";
    assert_eq!(text as usize, expected.len());
    let (status, error) = refusal(ask(json!("{")).await).await;
    assert_eq!(status, 400);
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("messages[1].tool_calls[0].function.arguments"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_cannot_be_called_are_refused_by_name() {
    let check = async |server: &Running, more: Value, param: &str, words: &str| {
        let (status, error) =
            refusal(server.post(CHAT, &chat_body("hi", more)).send().await.unwrap()).await;
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{message}");
        assert!(message.contains(words), "{message}");
    };
    let some = json!({"tools": [tool("a")]});
    let with = |more: Value| {
        let mut body = some.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let unknown = Running::start(settings());
    check(&unknown, some.clone(), "tools", "no calls in a form known here").await;
    let tags = server(TAGS);
    let required = with(json!({"tool_choice": "required"}));
    check(&tags, required.clone(), "tool_choice", "as <function=...>").await;
    ok(tags.post(CHAT, &chat_body("hi", with(json!({"max_tokens": 2})))).send().await.unwrap())
        .await;
    let hermes = server(HERMES);
    let mut odd = required.clone();
    odd["tools"][0]["function"]["parameters"] = json!({"type": "objec"});
    check(&hermes, odd, "tools", "objec").await;
    let pattern = json!({"properties": {"a": {"type": "string", "pattern": "a+"}}});
    let many: Vec<Value> = (0..70)
        .map(|n| json!({"type": "function", "function": {"name": format!("f{n}"), "parameters": pattern}}))
        .collect();
    let many = json!({"tools": many, "tool_choice": "required", "max_tokens": 1});
    check(&hermes, many, "tools", "70 patterns").await;
    let eos = with(json!({"tool_choice": "required", "ignore_eos": true}));
    check(&hermes, eos, "ignore_eos", "tool_choice").await;
    let object = with(json!({"response_format": {"type": "json_object"}}));
    check(&hermes, object, "response_format", "does not go with tools").await;
    check(&hermes, with(json!({"tool_choice": named("b")})), "tool_choice.function.name", "\"b\"")
        .await;
    let body = json!({"prompt": "hi", "tools": [tool("a")]});
    let (status, error) =
        refusal(hermes.post("/v1/completions", &body).send().await.unwrap()).await;
    assert_eq!((status, &error["param"]), (400, &json!("tools")));
}
