//! Checksums of messages: CRC-32 of the prompt and of the body of the reply.
//!
//! TCP's own checksum misses one damaged packet in some ten thousand, and proxies and memory have
//! none. CRC-32 finds every change of up to three bits in a record of usual size and all but one in
//! four billion of the rest, at more than ten gigabytes per second.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use crc32fast::Hasher;

/// The header of requests and replies that holds the [`Digest`] of their body.
pub const DIGEST_HEADER: &str = "dflash-digest";

/// The checksum of a request: its tokens, and the layers if it names them.
pub fn prompt_digest(input_ids: &[i64], layer_ids: Option<&[u32]>) -> String {
    let layer_ids = layer_ids.unwrap_or_default();
    let mut bytes = Vec::with_capacity(8 * (1 + input_ids.len() + layer_ids.len()));
    bytes.extend((input_ids.len() as u64).to_le_bytes());
    bytes.extend(input_ids.iter().flat_map(|id| id.to_le_bytes()));
    bytes.extend(layer_ids.iter().flat_map(|id| id.to_le_bytes()));
    hex(crc32fast::hash(&bytes))
}

/// The digest header of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    /// In a reply, [`prompt_digest`] of the request as the server read it.
    pub prompt: Option<String>,
    /// Checksum of the body.
    pub body: String,
    /// The body's length.
    pub bytes: u64,
}

impl Digest {
    /// The digest of a message with this body.
    pub fn of<'a>(prompt: Option<String>, body: impl IntoIterator<Item = &'a Bytes>) -> Self {
        let (mut hasher, mut bytes) = (Hasher::new(), 0);
        for chunk in body {
            hasher.update(chunk);
            bytes += chunk.len() as u64;
        }
        Self { prompt, body: hex(hasher.finalize()), bytes }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(prompt) = &self.prompt {
            write!(out, "prompt={prompt}; ")?;
        }
        write!(out, "body={}; bytes={}", self.body, self.bytes)
    }
}

/// The text is not a digest.
#[derive(Debug)]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let (mut prompt, mut body, mut bytes) = (None, None, None);
        for part in text.split("; ") {
            let (key, value) = part.split_once('=').ok_or(NotADigest)?;
            match key {
                "prompt" => prompt = Some(value.to_owned()),
                "body" => body = Some(value.to_owned()),
                "bytes" => bytes = value.parse().ok(),
                _ => return Err(NotADigest),
            }
        }
        Ok(Self { prompt, body: body.ok_or(NotADigest)?, bytes: bytes.ok_or(NotADigest)? })
    }
}

pub(crate) fn hex(crc: u32) -> String {
    format!("{crc:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_reads_what_it_writes() {
        let body = [Bytes::from_static(b"12345"), Bytes::from_static(b"6789")];
        // the check value of CRC-32
        let text = "prompt=00000001; body=cbf43926; bytes=9";
        let digest = Digest::of(Some("00000001".into()), &body);
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse::<Digest>().unwrap(), digest);
        for bad in ["", "body=cbf43926", "bytes=9", "body=1; bytes=x", "body=1; bytes=9; more=1"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn tokens_and_layers_make_a_prompt_s_digest() {
        let digest = prompt_digest(&[1, 2], Some(&[3]));
        for other in [
            prompt_digest(&[2, 1], Some(&[3])),
            prompt_digest(&[1, 2], None),
            prompt_digest(&[1, 2, 3], None),
        ] {
            assert_ne!(digest, other);
        }
    }
}
