//! Typed access to the keys of a `config.json`, with errors that name the key.

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A JSON object of a configuration file.
#[derive(Debug, Clone)]
pub struct Fields {
    path: PathBuf,
    /// Key of the object followed by a dot, for messages; empty at the top level.
    prefix: String,
    map: Map<String, Value>,
}

/// Reads and parses `dir/file`.
///
/// # Errors
/// [`Error::MissingFile`] if it does not exist; otherwise it cannot be read or parsed.
pub fn read_json<T: DeserializeOwned>(dir: &Path, file: &str) -> Result<T> {
    let path = dir.join(file);
    if !path.is_file() {
        return Err(Error::MissingFile { dir: dir.into(), file: file.into() });
    }
    let text = fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    serde_json::from_slice(&text).map_err(|source| Error::Json { path, source })
}

impl Fields {
    /// Reads `dir/file`, as [`read_json`] does.
    ///
    /// # Errors
    /// As [`read_json`].
    pub fn read(dir: &Path, file: &str) -> Result<Self> {
        Ok(Self { path: dir.join(file), prefix: String::new(), map: read_json(dir, file)? })
    }

    /// The fields of an object read from `path`; none if `value` is not an object.
    pub fn of(path: &Path, value: &Value) -> Self {
        let map = value.as_object().cloned().unwrap_or_default();
        Self { path: path.into(), prefix: String::new(), map }
    }

    /// Parses the fields of `text`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Json`].
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let map = serde_json::from_str(text)
            .map_err(|source| Error::Json { path: path.into(), source })?;
        Ok(Self { path: path.into(), prefix: String::new(), map })
    }

    /// The value under `key`; null counts as absent.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is present, even as null.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The required value of `key`, read by `read`.
    ///
    /// # Errors
    /// [`Error::Config`], also if it is absent.
    pub fn required<T, E: From<Error>>(
        &self,
        key: &str,
        read: impl Fn(&Self, &str) -> std::result::Result<Option<T>, E>,
    ) -> std::result::Result<T, E> {
        read(self, key)?.ok_or_else(|| self.refuse(key, "it is needed"))
    }

    /// The value of `key` converted by `convert`, if present.
    ///
    /// # Errors
    /// [`Error::Config`] with what is `expected`, if `convert` fails.
    pub fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.refuse(key, expected))
    }

    /// The object under `key`.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn object(&self, key: &str) -> Result<Option<Self>> {
        self.typed(key, "an object is needed", |value| value.as_object().map(|_| ()))?;
        Ok(self.object_if_any(key))
    }

    /// The object under `key`, if it is one.
    pub fn object_if_any(&self, key: &str) -> Option<Self> {
        let map = self.value(key)?.as_object()?.clone();
        Some(self.inner(key, map))
    }

    /// The object under `key`, or one without fields.
    pub fn object_or_empty(&self, key: &str) -> Self {
        self.object_if_any(key).unwrap_or_else(|| self.inner(key, Map::new()))
    }

    fn inner(&self, key: &str, map: Map<String, Value>) -> Self {
        Self { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), map }
    }

    /// Replaces every string value `from` by `to`.
    pub fn rename(&mut self, from: &str, to: &str) {
        for value in self.map.values_mut().filter(|value| value.as_str() == Some(from)) {
            *value = to.into();
        }
    }

    /// A positive integer.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn size(&self, key: &str) -> Result<Option<i64>> {
        let expected = "a positive integer is needed";
        self.typed(key, expected, |value| value.as_i64().filter(|&size| size > 0))
    }

    /// A token id.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn token(&self, key: &str) -> Result<Option<i64>> {
        self.typed(key, "a token id is needed", Value::as_i64)
    }

    /// A token id or a list of them; empty if absent.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn tokens(&self, key: &str) -> Result<Vec<i64>> {
        let ids = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
            id => id.as_i64().map(|id| vec![id]),
        };
        Ok(self.typed(key, "a token id or a list of them is needed", ids)?.unwrap_or_default())
    }

    /// A number.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number is needed", Value::as_f64)
    }

    /// False if absent.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn flag(&self, key: &str) -> Result<bool> {
        self.flag_or(key, false)
    }

    /// `default` if absent.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.typed(key, "true or false is needed", Value::as_bool)?.unwrap_or(default))
    }

    /// A string.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string is needed", |value| value.as_str().map(str::to_owned))
    }

    /// A list of strings.
    ///
    /// # Errors
    /// As [`Self::typed`].
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let list = |value: &Value| {
            value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
        };
        self.typed(key, "a list of strings is needed", list)
    }

    /// The error for an unusable value of `key`, as an error of the caller's crate.
    pub fn refuse<E: From<Error>>(&self, key: &str, expected: &str) -> E {
        let found = self.map.get(key).map_or_else(|| "missing".into(), Value::to_string);
        Error::config(&self.path, &format!("{}{key}", self.prefix), found, expected).into()
    }

    /// All keys and values.
    pub(crate) fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// The file that these fields come from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Result<Fields> {
        Fields::parse(Path::new("config.json"), text)
    }

    #[test]
    fn null_and_absent_are_the_same() {
        let fields = fields(r#"{"a": null, "b": 3, "eos": [1, 2]}"#).unwrap();
        assert_eq!(fields.size("a").unwrap(), None);
        assert_eq!(fields.size("c").unwrap(), None);
        assert!(fields.has("a") && !fields.has("c"));
        assert_eq!(fields.required("b", Fields::size).unwrap(), 3);
        assert_eq!(fields.tokens("eos").unwrap(), [1, 2]);
        assert_eq!(fields.tokens("b").unwrap(), [3]);
    }

    #[test]
    fn errors_name_the_key_and_what_it_holds() {
        let fields =
            fields(r#"{"hidden_size": "big", "heads": 0, "rope": {"type": "yarn"}}"#).unwrap();
        let check = |key: &str, expected: &str| {
            let message = fields.required(key, Fields::size).unwrap_err().to_string();
            assert!(message.ends_with(expected), "{message}");
        };
        check("hidden_size", "`hidden_size` is \"big\", but a positive integer is needed");
        check("heads", "`heads` is 0, but a positive integer is needed");
        check("layers", "`layers` is missing, but it is needed");
        let inner = fields.object("rope").unwrap().unwrap();
        assert!(inner.refuse::<Error>("type", "").to_string().contains("`rope.type` is \"yarn\""));
    }

    #[test]
    fn a_file_that_is_absent_or_not_an_object_is_named() {
        assert!(matches!(fields("{\"a\": 1"), Err(Error::Json { .. })));
        assert!(matches!(fields("[1]"), Err(Error::Json { .. })));
        let dir = tempfile::tempdir().unwrap();
        let error = Fields::read(dir.path(), "config.json").unwrap_err().to_string();
        assert!(error.contains("has no config.json"), "{error}");
    }
}
