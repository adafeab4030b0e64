//! Properties of loss masks under templates in the style of widely used models.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflash_data::Dataset;
use dflash_prepare::prepare;
use dflash_settings::PrepareSettings;
use dflash_test_support::{Rng, byte_tokenizer, random};
use serde_json::{Value, json};

use super::Bench;

/// Templates beside the tests of the chat crate, and what ends a turn under each.
const TEMPLATES: [(&str, &str); 5] = [
    ("chatml_thinking.jinja", "<|im_end|>"),
    ("headers_and_date.jinja", "<|eot_id|>"),
    ("inst.jinja", "</s>"),
    ("macros.jinja", "<|end|>"),
    ("turns_with_parts.jinja", "<end_of_turn>"),
];
const MARKERS: [&str; 12] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "</s>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|channel|>",
    "<end_of_turn>",
    "<start_of_turn>",
];

/// A model with one of the templates.
fn bench(template: &str, end: &str) -> Bench {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dflash-chat/tests/templates");
    let bench = Bench::new(&fs::read_to_string(text.join(template)).unwrap());
    let write = |name: &str, value: Value| {
        fs::write(bench.path(&format!("model/{name}")), value.to_string()).unwrap();
    };
    write("tokenizer.json", byte_tokenizer(&MARKERS));
    write("tokenizer_config.json", json!({"eos_token": end, "bos_token": "<|start|>"}));
    bench
}

/// Conversations of one to four questions, each answer with a text of its own.
fn conversations(count: usize) -> Vec<Vec<String>> {
    let mut rng = random();
    let words = ["four", "\u{e9}t\u{e9}", "a < b", "[x]", "no\n\nyes", "\u{4f60}\u{597d}", "<b>"];
    let mut answer = |number: usize, turn: usize| {
        let drawn: Vec<&str> =
            (0..rng.random_range(1..5)).map(|_| words[rng.random_range(0..words.len())]).collect();
        format!("answer {number}.{turn} {} end", drawn.join(" "))
    };
    let turns = |number: usize| 1 + number % 4;
    (0..count).map(|number| (0..turns(number)).map(|turn| answer(number, turn)).collect()).collect()
}

fn rows(conversations: &[Vec<String>]) -> String {
    let turns = |answers: &Vec<String>| -> Value {
        let pair = |answer: &String| {
            [
                json!({"role": "user", "content": "Why?"}),
                json!({"role": "assistant", "content": answer}),
            ]
        };
        answers.iter().flat_map(pair).collect()
    };
    conversations.iter().map(|it| json!({"messages": turns(it)}).to_string() + "\n").collect()
}

/// The supervised spans of all rows, as text.
fn spans(bench: &Bench) -> Vec<String> {
    let dataset = Dataset::open(&bench.path("out")).unwrap();
    let mut spans = Vec::new();
    for row in 0..dataset.len() {
        let sample = dataset.get(row).unwrap();
        let tokens = sample.input_ids.iter().zip(&sample.loss_mask);
        let tokens: Vec<(i64, bool)> = tokens.map(|(&id, &mask)| (id, mask)).collect();
        for part in tokens.chunk_by(|a, b| a.1 == b.1).filter(|part| part[0].1) {
            let bytes = part.iter().flat_map(|&(id, _)| match MARKERS.get(id as usize - 256) {
                _ if id < 256 => vec![id as u8],
                Some(marker) => marker.as_bytes().to_vec(),
                None => panic!("{id}"),
            });
            spans.push(String::from_utf8(bytes.collect()).unwrap());
        }
    }
    spans
}

#[test]
fn each_answer_is_supervised_once_with_its_end_of_turn() {
    for (template, end) in TEMPLATES {
        let (bench, conversations) = (bench(template, end), conversations(24));
        let summary = bench.prepare(&rows(&conversations)).unwrap();
        let (spans, answers) = (spans(&bench), conversations.concat());
        assert_eq!(spans.len(), answers.len(), "{template}\n{summary}");
        for (span, answer) in spans.iter().zip(&answers) {
            let text = span.strip_suffix(end).unwrap_or_else(|| panic!("{template}: {span:?}"));
            assert!(text.ends_with(answer.as_str()), "{template}: {span:?} for {answer:?}");
        }
        let total = summary.tally.answers.after_prompt + summary.tally.answers.in_server_context;
        assert_eq!(total, answers.len() as u64, "{template}\n{summary}");
        assert_eq!(summary.tally.answers.without_end, 0, "{template}\n{summary}");
    }
}

#[test]
fn a_cut_row_is_the_start_of_the_whole_one() {
    for (template, end) in TEMPLATES {
        let bench = bench(template, end);
        let file = bench.write("rows.jsonl", &rows(&conversations(8)));
        let run = |seq_length: usize| {
            let config = PrepareSettings { seq_length, ..bench.config(&[&file]) };
            prepare(&config, &AtomicBool::new(false)).unwrap();
            let dataset = Dataset::open(&bench.path("out")).unwrap();
            (0..dataset.len()).map(|row| dataset.get(row).unwrap()).collect::<Vec<_>>()
        };
        let whole = run(10_000);
        let cut = run(whole.iter().map(|sample| sample.input_ids.len()).max().unwrap() - 20);
        assert!(!cut.is_empty(), "{template}");
        for sample in &cut {
            let length = sample.input_ids.len();
            let starts = whole.iter().filter(|it| it.input_ids.starts_with(&sample.input_ids));
            let mut masks = starts.map(|it| &it.loss_mask[..length]);
            assert!(masks.any(|mask| mask == sample.loss_mask), "{template}");
        }
    }
}

#[test]
fn what_a_template_leaves_out_is_not_learned_as_an_empty_answer() {
    let bench = Bench::new(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n\
         {% if m.content is string %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let row = |answer: Value| {
        let turns = [json!({"role": "user", "content": "q"}), answer];
        json!({"messages": turns}).to_string() + "\n"
    };
    let rows = [
        row(json!({"role": "assistant", "content": [{"type": "text", "text": "a"}]})),
        row(json!({"role": "assistant", "content": "  "})),
        row(json!({"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]})),
        row(json!({"role": "assistant", "content": " a "})),
    ];
    let summary = bench.prepare(&rows.concat()).unwrap().to_string();
    assert_eq!(super::marked(&bench.path("out")), ["<user/q>/<assistant/[a>]/"]);
    for line in [
        "1: an answer that the chat template does not print (first: ",
        "1: assistant turn with neither content nor tool calls (first: ",
        "1: assistant turn of tool calls, which the chat template does not print (first: ",
    ] {
        assert!(summary.contains(line), "{line}\n{summary}");
    }
}

#[test]
fn an_end_that_comes_with_the_next_turn_is_found_where_that_drops_reasoning() {
    let bench = Bench::new(
        "{% for m in messages %}{% if m.role == 'user' %}<|im_end|>{% else %}<|im_start|>\
         {% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{% endif %}\
         {{ m.content.strip() }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
    );
    fs::write(bench.path("model/generation_config.json"), r#"{"eos_token_id": 257}"#).unwrap();
    let turns = json!([{"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"}]);
    bench.prepare(&json!({"messages": turns}).to_string()).unwrap();
    assert_eq!(super::marked(&bench.path("out")), [">q<[(r)a>]"]);
}

#[test]
fn a_turn_that_only_calls_a_tool_may_have_null_for_content() {
    let bench = Bench::new(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}\
         {% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let turns = json!([{"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}]);
    bench.prepare(&json!({"messages": turns}).to_string()).unwrap();
    let expect = r#"<user/q>/<assistant/[[{"name": "f"}]>]/"#;
    assert_eq!(super::marked(&bench.path("out")), [expect]);
}
