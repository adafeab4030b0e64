//! `response_format`: the required format of an answer.

use dflash_decode::GrammarSource;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::refusal::Refusal;

/// Maximum size of a schema as JSON, bytes: near OpenAI's bound for its names and values together.
const LARGEST_SCHEMA: usize = 128 << 10;

/// A format, and the field that its error messages name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Format {
    pub(crate) param: &'static str,
    pub(crate) source: GrammarSource,
}

/// The field as it is sent.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: JsonSchema },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonSchema {
    /// Names and describes it to people.
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    schema: Value,
    /// Every schema is enforced, whatever this says.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// The requested format; `None` for any text.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Format>, Refusal> {
    let format = match fields.take("response_format")? {
        None | Some(ResponseFormat::Text) => return Ok(None),
        Some(ResponseFormat::JsonObject) => {
            Format { param: "response_format", source: GrammarSource::json_object() }
        }
        Some(ResponseFormat::JsonSchema { json_schema: JsonSchema { schema, .. } }) => {
            let param = "response_format.json_schema.schema";
            check_schema(param, &schema)?;
            Format { param, source: GrammarSource::JsonSchema(schema) }
        }
    };
    Ok(Some(format))
}

/// Refuses a schema that is too large, contains options of the parsing library, or is known to take
/// very long to compile.
pub(crate) fn check_schema(param: &str, schema: &Value) -> Result<(), Refusal> {
    let bad = |reason: String| Err(Refusal::BadField { param: param.into(), reason });
    let bytes = schema.to_string().len();
    if bytes > LARGEST_SCHEMA {
        return bad(format!("has {bytes} bytes, but it may have {LARGEST_SCHEMA}"));
    }
    let mut cost = Cost { multiple: 1, ..Cost::default() };
    cost.add(schema);
    let most = if cost.combines { COMBINED_PATTERNS } else { MOST_PATTERNS };
    if cost.patterns > most {
        let where_combined = if cost.combines { " that is combined with others" } else { "" };
        let found = cost.patterns;
        return bad(format!(
            "has {found} patterns and formats, but a schema{where_combined} may have {most}"
        ));
    }
    if cost.multiple > LARGEST_MULTIPLE {
        return bad(format!(
            "has a multipleOf, or several with a common multiple, above {LARGEST_MULTIPLE} (counted in its \
             last decimal)"
        ));
    }
    match schema {
        Value::Bool(_) => Ok(()),
        Value::Object(fields) if fields.contains_key("x-guidance") => {
            bad("has the key x-guidance; leave it out".into())
        }
        Value::Object(_) => Ok(()),
        _ => bad("is not a JSON schema: it must be an object".into()),
    }
}

/// Maximum number of patterns and formats of a schema.
const MOST_PATTERNS: usize = 64;
/// The same if a string may have to match several at once: compilation then takes ten times as long
/// for every few more; four take a millisecond.
const COMBINED_PATTERNS: usize = 4;
/// Maximum number of remainders that must be distinguished, which is the number of states.
const LARGEST_MULTIPLE: u64 = 1000;

/// Keywords that combine schemas.
const APPLICATORS: [&str; 6] = ["allOf", "anyOf", "oneOf", "$ref", "enum", "const"];

/// Properties that make a schema expensive to compile.
#[derive(Debug, Default)]
struct Cost {
    patterns: usize,
    /// Whether several schemas may apply to one value.
    combines: bool,
    /// The least common multiple of all `multipleOf`.
    multiple: u64,
}

impl Cost {
    /// Counts everything that could be a keyword, including names of properties.
    fn add(&mut self, schema: &Value) {
        match schema {
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            Value::Object(fields) => {
                self.add_fields(fields);
                fields.values().for_each(|value| self.add(value));
            }
            _ => {}
        }
    }

    fn add_fields(&mut self, fields: &Map<String, Value>) {
        let patterns = fields.get("patternProperties").and_then(Value::as_object);
        let own = ["pattern", "format"].iter().filter(|key| fields.contains_key(**key)).count();
        self.patterns += own + patterns.map_or(0, Map::len);
        let applied = APPLICATORS.iter().filter(|key| fields.contains_key(**key)).count();
        let all = fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
        self.combines |= (applied > 0 && applied + own > 1) || all > 1;
        if let Some(multiple) = fields.get("multipleOf").and_then(Value::as_f64) {
            self.multiple = common_multiple(self.multiple, in_last_decimal(multiple));
        }
    }
}

/// 0.25 is 25 hundredths.
fn in_last_decimal(number: f64) -> u64 {
    let digits: String = format!("{number}").chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(u64::MAX).max(1)
}

fn common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).saturating_mul(b)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_from(format: &Value) -> Result<Option<Format>, Refusal> {
        read(&mut Fields::parse(json!({"response_format": format}).to_string().as_bytes(), 0)?)
    }

    #[test]
    fn formats_are_openais() {
        let check = |format: Value, expect: Option<GrammarSource>| {
            let found = read_from(&format).unwrap().map(|format| format.source);
            assert_eq!(found, expect, "{format}");
        };
        check(Value::Null, None);
        check(json!({"type": "text"}), None);
        check(json!({"type": "json_object"}), Some(GrammarSource::json_object()));
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let source = Some(GrammarSource::JsonSchema(schema.clone()));
        let named = json!({"name": "a", "schema": schema, "strict": true, "description": "d"});
        check(json!({"type": "json_schema", "json_schema": named}), source);
    }

    #[test]
    fn what_is_no_format_is_refused_by_name() {
        let check = |format: Value, words: &str| {
            let text = read_from(&format).unwrap_err().to_string();
            assert!(text.starts_with("response_format") && text.contains(words), "{text}");
        };
        check(json!({"type": "xml"}), "unknown variant `xml`");
        check(json!({"type": "json_schema"}), "missing field `json_schema`");
        check(
            json!({"type": "json_schema", "json_schema": {"name": "a"}}),
            "missing field `schema`",
        );
        check(
            json!({"type": "json_schema", "json_schema": {"schema": {}}}),
            "missing field `name`",
        );
        let of = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
        check(of(json!([1])), "schema is not a JSON schema");
        check(of(json!({"x-guidance": {}})), "x-guidance");
        check(of(json!({"enum": ["a".repeat(LARGEST_SCHEMA)]})), "but it may have 131072");
    }

    #[test]
    fn schemas_that_take_for_ever_are_told_by_what_they_have() {
        let check = |schema: Value, expect: Option<&str>| {
            let error = check_schema("it", &schema).err().map(|error| error.to_string());
            match expect {
                None => assert_eq!(error, None, "{schema}"),
                Some(words) => assert!(error.is_some_and(|e| e.contains(words)), "{schema}"),
            }
        };
        let patterns = |n: usize| (0..n).map(|n| json!({"pattern": format!("{n}")}));
        check(json!({"anyOf": patterns(64).collect::<Vec<_>>()}), None);
        check(json!({"anyOf": patterns(65).collect::<Vec<_>>()}), Some("65 patterns"));
        check(json!({"allOf": patterns(4).collect::<Vec<_>>()}), None);
        check(json!({"allOf": patterns(5).collect::<Vec<_>>()}), Some("may have 4"));
        let chain: Map<String, Value> = (0..9)
            .map(|n| {
                let next = format!("#/$defs/{}", n + 1);
                (n.to_string(), json!({"format": "date", "$ref": next}))
            })
            .collect();
        check(json!({"$ref": "#/$defs/0", "$defs": chain}), Some("9 patterns"));
        let refs: Vec<Value> = (0..9).map(|_| json!({"$ref": "#/$defs/a"})).collect();
        check(json!({"anyOf": refs, "$defs": {"a": {"format": "uuid"}}}), None);
        let multiples = |of: &[f64]| json!({"prefixItems": of.iter().map(|n| json!({"multipleOf": n})).collect::<Vec<_>>()});
        check(multiples(&[0.01, 0.5, 5.0, 100.0]), None);
        check(multiples(&[1001.0]), Some("multipleOf"));
        check(multiples(&[1e300]), Some("multipleOf"));
        check(multiples(&[31.0, 37.0]), Some("multipleOf"));
    }
}
