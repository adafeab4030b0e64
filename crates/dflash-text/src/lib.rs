//! Conversations, chat templates and tokenizers: what turns messages into token ids.
