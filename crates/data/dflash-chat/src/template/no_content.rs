//! The content of a turn that only calls tools.
//!
//! Such a turn has no content. Some templates test `content is none` to see that there are only
//! calls; others do not test and then print Python's `None`, which the model never wrote. So this
//! value counts as none where it is tested, and prints as nothing.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Value};

#[derive(Debug)]
struct NoContent;

impl Object for NoContent {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        false
    }

    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

pub(super) fn value() -> Value {
    Value::from_object(NoContent)
}

pub(super) fn is_none(value: &Value) -> bool {
    value.is_none() || value.downcast_object_ref::<NoContent>().is_some()
}
