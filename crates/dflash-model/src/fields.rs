//! Typed access to the keys of a `config.json`, with errors that name the key.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// A JSON object of a configuration file.
#[derive(Debug)]
pub(crate) struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads `dir/file`.
    ///
    /// # Errors
    /// [`Error::MissingFile`] when it is not there; otherwise it cannot be read or is not an object.
    pub(crate) fn read(dir: &Path, file: &str) -> Result<Self> {
        let path = dir.join(file);
        if !path.is_file() {
            return Err(Error::MissingFile { dir: dir.into(), file: file.into() });
        }
        let text = fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        let map = serde_json::from_slice(&text)
            .map_err(|source| Error::Json { path: path.clone(), source })?;
        Ok(Self { path, map })
    }

    /// The object under `key`, if it is there.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { path: self.path.clone(), map: map.clone() }))
            }
            Some(_) => Err(self.refuse(key, "an object is needed")),
        }
    }

    /// The value under `key`; null counts as absent.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is written at all, be it as null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// A positive integer, if it is there.
    pub(crate) fn size(&self, key: &str) -> Result<Option<i64>> {
        let expected = "a positive integer is needed";
        self.typed(key, expected, |value| value.as_i64().filter(|&size| size > 0))
    }

    /// A positive integer that every model has.
    pub(crate) fn required_size(&self, key: &str) -> Result<i64> {
        self.size(key)?.ok_or_else(|| self.refuse(key, "a positive integer is needed"))
    }

    /// A token id, if it is there.
    pub(crate) fn token(&self, key: &str) -> Result<Option<i64>> {
        self.typed(key, "a token id is needed", Value::as_i64)
    }

    /// A token id or a list of them; empty when absent.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<i64>> {
        let ids = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
            id => id.as_i64().map(|id| vec![id]),
        };
        Ok(self.typed(key, "a token id or a list of them is needed", ids)?.unwrap_or_default())
    }

    /// A number, if it is there.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number is needed", Value::as_f64)
    }

    /// A flag, if it is there.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false is needed", Value::as_bool)
    }

    /// A string, if it is there.
    pub(crate) fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string is needed", |value| value.as_str().map(str::to_owned))
    }

    /// A list of strings, if it is there.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let list = |value: &Value| {
            value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
        };
        self.typed(key, "a list of strings is needed", list)
    }

    /// The error for a value of `key` that will not do.
    pub(crate) fn refuse(&self, key: &str, expected: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "missing".into(), Value::to_string);
        Error::Config { path: self.path.clone(), key: key.into(), found, expected: expected.into() }
    }

    /// The file these fields come from.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.refuse(key, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Result<Fields> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), text).unwrap();
        Fields::read(dir.path(), "config.json")
    }

    #[test]
    fn null_and_absent_are_the_same() {
        let fields = fields(r#"{"a": null, "b": 3, "eos": [1, 2]}"#).unwrap();
        assert_eq!(fields.size("a").unwrap(), None);
        assert_eq!(fields.size("c").unwrap(), None);
        assert!(fields.has("a") && !fields.has("c"));
        assert_eq!(fields.required_size("b").unwrap(), 3);
        assert_eq!(fields.tokens("eos").unwrap(), [1, 2]);
        assert_eq!(fields.tokens("b").unwrap(), [3]);
    }

    #[test]
    fn errors_name_the_key_and_what_it_holds() {
        let fields = fields(r#"{"hidden_size": "big", "heads": 0}"#).unwrap();
        let message = |key| fields.required_size(key).unwrap_err().to_string();
        assert!(
            message("hidden_size")
                .ends_with("`hidden_size` is \"big\", but a positive integer is needed")
        );
        assert!(message("heads").contains("`heads` is 0"));
        assert!(message("layers").contains("`layers` is missing"));
    }

    #[test]
    fn a_file_that_is_absent_or_no_object_is_named() {
        assert!(matches!(fields("{\"a\": 1"), Err(Error::Json { .. })));
        assert!(matches!(fields("[1]"), Err(Error::Json { .. })));
        let dir = tempfile::tempdir().unwrap();
        let error = Fields::read(dir.path(), "config.json").unwrap_err().to_string();
        assert!(error.contains("has no config.json"), "{error}");
    }
}
