//! Conversations to rendered, tokenized and masked Arrow shards.
