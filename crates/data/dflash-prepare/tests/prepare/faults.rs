//! Faulty rows, templates and sizes: counted, repaired or cut, and never silently.

use std::fs;
use std::sync::atomic::AtomicBool;

use dflash_data::Dataset;
use dflash_prepare::prepare;
use dflash_settings::PrepareSettings;
use serde_json::{Value, json};

use super::{Bench, CHATML, FORGETFUL, SCAFFOLD};

#[test]
fn turns_that_say_nothing_are_taken_out_and_counted() {
    let bench = Bench::new(CHATML);
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let rows = [
        json!({"messages": [turn("user", "q"), {"role": "assistant", "contnt": "a"}]}),
        json!({"messages": [turn("user", "q"), turn("assistant", ""), turn("user", "r"),
            turn("assistant", "b")]}),
        json!({"messages": [{"role": "user", "contnt": "q"}, turn("assistant", "a")]}),
        json!({"messages": [turn("user", "q"),
            {"role": "assistant", "content": "a", "mood": 1, "refusal": null}]}),
        json!({"question": "q", "answer": ""}),
        json!({"messages": [turn("user", ""), turn("assistant", "a")]}),
        json!({"messages": [turn("user", "q"),
            {"role": "assistant", "content": null, "reasoning_content": "hm"}]}),
    ];
    let text: Vec<String> = rows.iter().map(Value::to_string).collect();
    let summary = bench.prepare(&text.join("\n")).unwrap();
    let kept = [
        "<user/q>/<user/r>/<assistant/[b>]/",
        "<user/q>/<assistant/[a>]/",
        "<user/>/<assistant/[a>]/",
    ];
    assert_eq!(bench.rows(), kept);
    let text = summary.to_string().replace(bench.root.path().to_str().unwrap(), "");
    for line in [
        "rows read          7",
        "rows written       3",
        "dropped            3: no assistant turn after another turn (first: /rows.jsonl:1)",
        "dropped            1: a turn without content (first: /rows.jsonl:3)",
        "turns dropped      4: assistant turn with neither content nor tool calls \
         (first: /rows.jsonl:1)",
        "unknown keys       contnt (2 messages), mood (1 message)",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let provenance: Value =
        serde_json::from_slice(&fs::read(bench.path("out/dflash_prepare.json")).unwrap()).unwrap();
    assert_eq!(provenance["turns_dropped"]["empty_turn"]["count"], 4);
    assert_eq!(provenance["unknown_keys"], json!({"contnt": 2, "mood": 1}));
    fs::remove_dir_all(bench.path("out")).unwrap();
    let misspelled = json!({"messages": [turn("user", "q"), {"role": "assistant", "contnt": "a"}]});
    bench.check_refusal(&misspelled.to_string(), "unknown keys in messages: contnt (1 message)");
}

#[test]
fn a_turn_of_tool_calls_says_no_more_than_the_calls() {
    let calls = json!([{"function": {"name": "f", "arguments": {}}}]);
    let row = |content: Option<Value>| {
        let mut call = json!({"role": "assistant", "tool_calls": calls});
        if let Some(content) = content {
            call["content"] = content;
        }
        json!({"messages": [{"role": "user", "content": "q"}, call,
            {"role": "tool", "content": "1"}, {"role": "assistant", "content": "a"}]})
        .to_string()
    };
    // Prints any content and tests for none.
    let printing = "{% for m in messages %}<|im_start|>{{ m.role[0] }}:{{ m.content }}\
        {% if m.content is none %}!{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}\
        {% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>a:{% endif %}";
    let bench = Bench::new(printing);
    let rows = [row(None), row(Some(Value::Null)), row(Some(json!("")))].join("\n");
    bench.prepare(&rows).unwrap();
    let bare = "<u:q><a:[!f>]<t:1><a:[a>]";
    assert_eq!(bench.rows(), [bare, bare, "<u:q><a:[f>]<t:1><a:[a>]"]);

    // A template that prints no calls would train the model to say nothing.
    let bench = Bench::new(CHATML);
    let summary = bench.prepare(&row(None)).unwrap();
    assert_eq!(bench.rows(), ["<user/q>/<assistant/>/<tool/1>/<assistant/[a>]/"]);
    let expect = "turns dropped      1: assistant turn of tool calls, which the chat template";
    assert!(summary.to_string().contains(expect), "{summary}");
}

#[test]
fn blank_reasoning_opens_no_channel() {
    let harmony = "{% for m in messages %}<|im_start|>{{ m.role[0] }}:\
        {% if 'thinking' in m %}({{ m.thinking }}){% endif %}{{ m.content }}<|im_end|>{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>a:{% endif %}";
    let bench = Bench::new(harmony);
    let row = |name: &str, reasoning: &str| {
        json!({"messages": [{"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", name: reasoning}]})
        .to_string()
    };
    let rows = [row("reasoning_content", ""), row("thinking", " "), row("reasoning", "r")];
    bench.prepare(&rows.join("\n")).unwrap();
    assert_eq!(bench.rows(), ["<u:q><a:[a>]", "<u:q><a:[a>]", "<u:q><a:[(r)a>]"]);
}

#[test]
fn a_template_may_reverse_what_is_empty() {
    let reversing = "{% for m in messages %}{{ ''[::-1] }}{{ m.content[5:2] }}{% for n in \
        messages[1:][::-1] %}{% endfor %}{{ m.content[::-1] }}<|im_end|>{% endfor %}";
    let bench = Bench::new(reversing);
    bench.prepare(r#"{"question": "qr", "answer": "ab"}"#).unwrap();
    assert_eq!(bench.rows(), ["rq>[ba>]"]);
}

/// Rows too long to encode in full give the same result as if they were encoded and then cut.
#[test]
fn giant_rows_are_cut_before_they_are_encoded() {
    let seq_length = 2000;
    let prepared = |template: &str, messages: &[(&str, String)], whole: bool| {
        let bench = Bench::new(template);
        let messages: Vec<Value> = messages
            .iter()
            .map(|(role, content)| json!({"role": role, "content": content}))
            .collect();
        let file = bench.write("rows.jsonl", &json!({"messages": messages}).to_string());
        // A sequence length at which nothing is cut.
        let length = if whole { 1 << 24 } else { seq_length };
        let config = PrepareSettings { seq_length: length, ..bench.config(&[&file]) };
        let summary = prepare(&config, &AtomicBool::new(false)).map(|summary| summary.tally);
        let samples = summary.is_ok().then(|| {
            let dataset = Dataset::open(&bench.path("out")).unwrap();
            (0..dataset.len()).map(|row| dataset.get(row).unwrap()).collect::<Vec<_>>()
        });
        (summary.map_err(|error| error.to_string()), samples.unwrap_or_default())
    };
    let giant = "giant <|im_end|> words ".repeat(50_000);
    let short = |text: &str| text.to_owned();
    let conversations = [
        vec![("user", short("q")), ("assistant", giant.clone())],
        vec![
            ("user", short("q")),
            ("assistant", short("a")),
            ("user", giant.clone()),
            ("assistant", short("b")),
        ],
        vec![
            ("user", short("q")),
            ("assistant", short("r</think>a")),
            ("user", short("s")),
            ("assistant", giant.clone()),
        ],
    ];
    for template in [CHATML, FORGETFUL, SCAFFOLD] {
        for messages in &conversations {
            let (_, mut whole) = prepared(template, messages, true);
            let (tally, cut) = prepared(template, messages, false);
            let is_supervised = |sample: &mut dflash_data::Sample| {
                sample.input_ids.truncate(seq_length);
                sample.loss_mask.truncate(seq_length);
                sample.loss_mask.contains(&true)
            };
            whole.retain_mut(is_supervised);
            assert_eq!(cut, whole, "{template}: {}", messages.len());
            assert!(tally.is_ok(), "{tally:?}");
        }
    }
    let question = [("user", giant.clone()), ("assistant", short("a"))];
    let (tally, samples) = prepared(CHATML, &question, false);
    assert!(samples.is_empty());
    assert!(tally.unwrap_err().contains("1 nothing supervised within --seq-length"));
    let many: Vec<(&str, String)> = (0..20_000)
        .map(|n| {
            (if n % 2 == 0 { "user" } else { "assistant" }, format!("{n} {}", "x".repeat(200)))
        })
        .collect();
    let (tally, samples) = prepared(CHATML, &many, false);
    assert_eq!((samples.len(), tally.unwrap().truncated), (1, 1));
}
