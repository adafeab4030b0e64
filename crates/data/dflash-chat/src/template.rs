//! The model's own chat template, rendered as Transformers renders it.
//!
//! Transformers uses Jinja2 with `trim_blocks`, `lstrip_blocks`, loop controls, its own `tojson`,
//! `raise_exception`, `strftime_now` and a `{% generation %}` tag. minijinja differs from Jinja2 in
//! some details that real templates use; `template/python.rs` handles those.

mod caught;
mod no_content;
mod python;
mod slices;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use minijinja::{Environment, context};
use serde_json::{Map, Value};

use crate::error::{Error, json_type};
use crate::message::Message;

pub use caught::panics_are_caught;

/// The environment's name for the template that Transformers calls `default`.
const DEFAULT: &str = "default";
/// The named template that Transformers prefers if the conversation has tools.
const TOOL_USE: &str = "tool_use";
/// Where models keep named templates as files, next to `chat_template.jinja`.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Variables that no caller may set, because they are what is rendered.
const RESERVED: [&str; 2] = ["messages", "add_generation_prompt"];
/// The variable for the tools on offer.
const TOOLS: &str = "tools";

/// A compiled chat template with its constant variables.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    /// The templates with their names, as the model has them.
    sources: Vec<(String, String)>,
    variables: BTreeMap<String, Value>,
}

/// A template as the model has it.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    name: String,
    text: String,
}

impl ChatTemplate {
    /// Finds and compiles the template of a model directory: `chat_template.jinja`, else
    /// `chat_template.json`, else `chat_template` of `tokenizer_config.json` (a string, or a list of
    /// named templates of which `default` and `tool_use` are used); and with any of these
    /// `additional_chat_templates/tool_use.jinja`. `variables` are the special tokens (`bos_token`,
    /// ...) that the template may use.
    pub(crate) fn load(dir: &Path, variables: BTreeMap<String, Value>) -> Result<Self, Error> {
        let mut environment = python::environment();
        let mut sources = Vec::new();
        for Source { path, name, text } in find_sources(dir)? {
            let source = slices::replace_slices(&python::replace_generation_tags(&text));
            environment
                .add_template_owned(name.clone(), source)
                .map_err(|error| Error::BadTemplate { path, reason: explain(&error) })?;
            sources.push((name, text));
        }
        Ok(Self { environment, sources, variables })
    }

    /// See [`crate::ChatTokenizer::extend_template_variables`].
    pub(crate) fn extend_variables(
        &mut self,
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<(), Error> {
        let variables: Map<String, Value> = variables.into_iter().collect();
        check_variables(&variables)?;
        self.variables.extend(variables);
        Ok(())
    }

    /// The templates with their names, as the model has them.
    pub(crate) fn sources(&self) -> &[(String, String)] {
        &self.sources
    }

    /// See [`crate::ChatTokenizer::render`].
    pub(crate) fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        more: &Map<String, Value>,
    ) -> Result<String, Error> {
        check_variables(more)?;
        let rendered = self.render_once(messages, tools, add_generation_prompt, more);
        if rendered.is_ok() || messages.iter().all(|message| !message.content.is_null()) {
            return rendered;
        }
        // OpenAI's own form of a turn that only calls tools; many templates want a text.
        let with_text = |message: &Message| match message.content {
            Value::Null => Message { content: "".into(), ..message.clone() },
            _ => message.clone(),
        };
        let messages: Vec<Message> = messages.iter().map(with_text).collect();
        self.render_once(&messages, tools, add_generation_prompt, more).or(rendered)
    }

    fn render_once(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        more: &Map<String, Value>,
    ) -> Result<String, Error> {
        let messages: Vec<minijinja::Value> = messages.iter().map(as_value).collect();
        let mut variables = self.variables.clone();
        variables.extend(more.clone());
        let usual_tools = variables.remove(TOOLS).filter(has_items);
        let tools = tools.or(usual_tools.as_ref());
        // Transformers' arguments of the same name; without any, templates test for none.
        variables.entry("documents".to_owned()).or_insert(Value::Null);
        let tool_use = tools.and_then(|_| self.environment.get_template(TOOL_USE).ok());
        let render = || {
            let default = || self.environment.get_template(DEFAULT);
            tool_use.map_or_else(default, Ok)?.render(context! {
                messages, tools, add_generation_prompt,
                ..minijinja::Value::from_serialize(&variables)
            })
        };
        caught::catch(render)
            .map_err(|panic| Error::Render {
                reason: format!("the template engine failed: {panic}"),
            })?
            .map_err(|error| Error::Render { reason: explain(&error) })
    }
}

/// Whether a caller may set these.
fn check_variables(variables: &Map<String, Value>) -> Result<(), Error> {
    if let Some(key) = RESERVED.into_iter().find(|key| variables.contains_key(*key)) {
        return Err(Error::ReservedVariable { key: key.into() });
    }
    match variables.get(TOOLS) {
        None | Some(Value::Null | Value::Array(_)) => Ok(()),
        Some(other) => Err(Error::FieldType {
            field: format!("{TOOLS} of chat_template_kwargs"),
            expected: "a list",
            found: json_type(other),
        }),
    }
}

/// An empty list counts as none, in rows too.
fn has_items(list: &Value) -> bool {
    list.as_array().is_some_and(|items| !items.is_empty())
}

/// The dictionary that a template gets. See [`no_content`].
fn as_value(message: &Message) -> minijinja::Value {
    let value = minijinja::Value::from_serialize(message);
    if !message.content.is_null() {
        return value;
    }
    let keys = value.try_iter().into_iter().flatten();
    keys.map(|key| match key.as_str() {
        Some("content") => (key, no_content::value()),
        _ => {
            let item = value.get_item(&key).unwrap_or_default();
            (key, item)
        }
    })
    .collect()
}

/// The engine's message on one line, with the template's line if it is known.
fn explain(error: &minijinja::Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        // A message that a template raises on purpose is a complete sentence.
        Some(line) if !python::is_raised(error) => format!("{text} (line {line} of the template)"),
        _ => text,
    }
}

/// The model's templates, one of them the default.
fn find_sources(dir: &Path) -> Result<Vec<Source>, Error> {
    let mut sources = main_sources(dir)?;
    let path = dir.join(MORE_TEMPLATES).join(format!("{TOOL_USE}.jinja"));
    if let Some(text) = read_optional(&path)? {
        // A file wins over a list's entry of the same name, as in Transformers.
        sources.retain(|source| source.name != TOOL_USE);
        sources.push(Source { path, name: TOOL_USE.to_owned(), text });
    }
    Ok(sources)
}

/// The templates of the first place that has a default one.
fn main_sources(dir: &Path) -> Result<Vec<Source>, Error> {
    let path = dir.join("chat_template.jinja");
    if let Some(text) = read_optional(&path)? {
        return Ok(vec![Source { path, name: DEFAULT.to_owned(), text }]);
    }
    for file in ["chat_template.json", "tokenizer_config.json"] {
        let path = dir.join(file);
        let Some(text) = read_optional(&path)? else { continue };
        let json: Value = serde_json::from_str(&text)
            .map_err(|source| Error::ModelJson { path: path.clone(), source })?;
        let named = named_sources(&json["chat_template"]).into_iter();
        let sources: Vec<Source> =
            named.map(|(name, text)| Source { path: path.clone(), name, text }).collect();
        if sources.iter().any(|source| source.name == DEFAULT) {
            return Ok(sources);
        }
    }
    Err(Error::NoTemplate { dir: dir.into() })
}

fn named_sources(value: &Value) -> Vec<(String, String)> {
    match value {
        Value::String(source) => vec![(DEFAULT.to_owned(), source.clone())],
        Value::Array(list) => list
            .iter()
            .filter_map(|entry| {
                Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned()))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// The text of a file, or `None` when there is no such file.
pub(crate) fn read_optional(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.into(), source }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::message::Role;

    fn template(source: &str) -> Result<ChatTemplate, Error> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        ChatTemplate::load(dir.path(), BTreeMap::from([("bos_token".to_owned(), json!("<s>"))]))
    }

    /// Renders a one-turn conversation, without a generation prompt.
    fn check(source: &str, expect: &str) {
        let messages = [Message::text(Role::User, "a<b>\n")];
        let found = template(source).unwrap().render(&messages, None, false, &Map::new()).unwrap();
        assert_eq!(found, expect, "{source}");
    }

    #[test]
    fn whitespace_and_variables_follow_transformers() {
        check("{% if true %}\n  x\n{% endif %}\n\n", "  x\n");
        check("{{ bos_token }}{{ messages[0].content }}", "<s>a<b>\n");
        check("{{ messages[0]['content'] | trim }}|{{ tools }}", "a<b>|None");
        check("{{ tools is iterable }} {{ tools is not none }} {{ nothing }}", "False False ");
        check("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "a<b>\n"}"#);
        check("{{ add_generation_prompt }}", "False");
        check(
            "{% for i in [0, 1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
        );
    }

    #[test]
    fn generation_tags_leave_their_content() {
        check("a{% generation %}b{% endgeneration %}c", "abc");
        check("a\n  {%- generation -%}\n b\n{%- endgeneration %}\nc", "abc");
    }

    #[test]
    fn a_refusal_carries_the_words_of_the_template() {
        let template = template("{{ raise_exception('roles must alternate') }}").unwrap();
        let error = template.render(&[], None, false, &Map::new()).unwrap_err().to_string();
        assert_eq!(error, "the chat template refused the conversation: roles must alternate");
    }

    /// Renders a turn that only calls a tool.
    fn check_call(source: &str, expect: &str) {
        let call = json!([{"function": {"name": "f"}}]);
        let message = Message {
            content: Value::Null,
            tool_calls: Some(call),
            ..Message::text(Role::Assistant, "")
        };
        let found = template(source).unwrap().render(&[message], None, false, &Map::new()).unwrap();
        assert_eq!(found, expect, "{source}");
    }

    #[test]
    fn a_content_that_is_not_there_is_none_and_prints_nothing() {
        check_call("[{{ messages[0].content }}]", "[]");
        check_call("{{ '[' ~ messages[0].content ~ messages[0]['content'] | trim ~ ']' }}", "[]");
        check_call(
            "{{ messages[0].content is none }}{{ messages[0].content is string }}",
            "TrueFalse",
        );
        check_call("{{ messages[0].content or '-' }}{{ 'content' in messages[0] }}", "-True");
        check_call("{% if messages[0].content is not none %}x{% endif %}", "");
        check_call(
            "{{ messages[0].content == none }}{{ messages[0].content != none }}",
            "TrueFalse",
        );
        check_call(
            "{{ messages[0].tool_calls[0].function.name }}{{ messages[0].role }}",
            "fassistant",
        );
        check_call("{{ messages[0].content | tojson }}{{ none }}", "nullNone");
    }

    #[test]
    fn a_panic_in_the_engine_is_an_error() {
        let panicking = || panic!("index out of bounds");
        assert!(!panics_are_caught());
        let caught: Result<(), String> = caught::catch(|| {
            assert!(panics_are_caught());
            panicking()
        });
        assert_eq!(caught.unwrap_err(), "index out of bounds");
        assert!(!panics_are_caught());
    }

    #[test]
    fn a_syntax_error_names_file_and_line() {
        let error = template("\n{% if %}").unwrap_err().to_string();
        assert!(error.contains("chat_template.jinja does not parse: "), "{error}");
        assert!(error.ends_with("(line 2 of the template)"), "{error}");
    }

    #[test]
    fn the_template_is_found_where_transformers_finds_it() {
        let dir = tempfile::tempdir().unwrap();
        let load = || ChatTemplate::load(dir.path(), BTreeMap::new());
        let render = || load().unwrap().render(&[], None, false, &Map::new()).unwrap();
        assert!(load().unwrap_err().to_string().contains("has no chat template"));

        let config = dir.path().join("tokenizer_config.json");
        fs::write(&config, "{").unwrap();
        assert!(load().unwrap_err().to_string().contains("tokenizer_config.json is not valid"));
        fs::write(&config, r#"{"chat_template": "config"}"#).unwrap();
        assert_eq!(render(), "config");
        let named = json!({"chat_template": [
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]});
        fs::write(&config, named.to_string()).unwrap();
        assert_eq!(render(), "plain");
        let tools = json!([{"name": "f"}]);
        assert_eq!(load().unwrap().render(&[], Some(&tools), false, &Map::new()).unwrap(), "tools");
        fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(render(), "file");
        let with_tools = || load().unwrap().render(&[], Some(&tools), false, &Map::new()).unwrap();
        assert_eq!(with_tools(), "file");
        let more = dir.path().join("additional_chat_templates");
        fs::create_dir(&more).unwrap();
        fs::write(more.join("tool_use.jinja"), "tools of a file").unwrap();
        assert_eq!((render(), with_tools()), ("file".to_owned(), "tools of a file".to_owned()));
    }

    #[test]
    fn a_template_for_tools_in_a_file_goes_with_a_default_of_any_place() {
        let tools = json!([{"name": "f"}]);
        let named = json!([{"name": "tool_use", "template": "listed"},
                           {"name": "default", "template": "plain"}]);
        for (file, chat_template) in [
            ("chat_template.json", json!("plain")),
            ("tokenizer_config.json", json!("plain")),
            ("tokenizer_config.json", named),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let text = json!({ "chat_template": chat_template }).to_string();
            fs::write(dir.path().join(file), text).unwrap();
            let more = dir.path().join("additional_chat_templates");
            fs::create_dir(&more).unwrap();
            fs::write(more.join("tool_use.jinja"), "tools of a file").unwrap();
            let load = || ChatTemplate::load(dir.path(), BTreeMap::new());
            let template = load().unwrap();
            let render = |tools| template.render(&[], tools, false, &Map::new()).unwrap();
            assert_eq!(render(None), "plain", "{file}");
            assert_eq!(render(Some(&tools)), "tools of a file", "{file}");
            fs::write(more.join("tool_use.jinja"), "{% if %}").unwrap();
            let error = load().unwrap_err().to_string();
            assert!(error.contains("tool_use.jinja does not parse"), "{error}");
        }
    }

    #[test]
    fn tools_among_the_variables_are_for_conversations_without_any() {
        let dir = tempfile::tempdir().unwrap();
        let named = json!({"chat_template": [
            {"name": "tool_use", "template": "{{ tools[0].name }}"},
            {"name": "default", "template": "{{ tools is none }}"}]});
        fs::write(dir.path().join("tokenizer_config.json"), named.to_string()).unwrap();
        let mut template = ChatTemplate::load(dir.path(), BTreeMap::new()).unwrap();
        let check = |template: &ChatTemplate, own: Value, more: Value, expect: &str| {
            let (own, more) = (Some(&own).filter(|own| !own.is_null()), more.as_object().unwrap());
            assert_eq!(template.render(&[], own, false, more).unwrap(), expect, "{more:?}");
        };
        let tools = |name: &str| json!({"tools": [{ "name": name }]});
        check(&template, Value::Null, tools("f"), "f");
        check(&template, tools("own")["tools"].clone(), tools("f"), "own");
        for none in [json!({"tools": []}), json!({"tools": null})] {
            check(&template, Value::Null, none, "True");
        }
        template.extend_variables(tools("constant").as_object().unwrap().clone()).unwrap();
        check(&template, Value::Null, json!({}), "constant");
        check(&template, Value::Null, tools("f"), "f");
        check(&template, Value::Null, json!({"tools": []}), "True");
    }

    #[test]
    fn variables_that_are_what_is_rendered_are_refused() {
        let mut template = template("{{ messages }}").unwrap();
        let mut refuse = |variables: Value, words: &str| {
            let variables = variables.as_object().unwrap();
            let error = template.render(&[], None, false, variables).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let error = template.extend_variables(variables.clone()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refuse(json!({"messages": []}), "chat_template_kwargs cannot set messages");
        refuse(json!({"add_generation_prompt": true}), "cannot set add_generation_prompt");
        let wrong = "tools of chat_template_kwargs must be a list, found an object";
        refuse(json!({"tools": {"name": "f"}}), wrong);
    }

    #[test]
    fn variables_of_a_call_win_over_the_templates_own() {
        let template = template("{{ mode }}{{ bos_token }}").unwrap();
        let render = |more: Value| {
            let more = more.as_object().unwrap().clone();
            template.render(&[], None, false, &more).unwrap()
        };
        let usual = render(json!({}));
        assert_eq!(render(json!({"mode": "x"})), format!("x{usual}"));
        assert_eq!(render(json!({"bos_token": "other"})), "other");
        let documents = "{{ documents is none }}{{ documents[0].text if documents }}";
        let template = self::template(documents).unwrap();
        let render =
            |more: Value| template.render(&[], None, false, more.as_object().unwrap()).unwrap();
        assert_eq!(render(json!({})), "True");
        assert_eq!(render(json!({"documents": [{"text": "d"}]})), "Falsed");
    }
}
