//! The body of a reply: an Arrow IPC stream with one column per layer, one row per token.
//!
//! Columns are `FixedSizeBinary(hidden_size * element size)` named `layer_{id}`; the schema's
//! metadata holds `dtype`, `layer_ids` (a JSON list), `hidden_size` and `model`. Any Arrow reader
//! takes it. Arrow's own writer would copy every row into a message body; since our columns are
//! plain byte ranges, the record batch's header is built here and the rows go out as they are.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::ipc;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use bytes::{BufMut, Bytes, BytesMut};
use flatbuffers::FlatBufferBuilder;

use crate::error::Error;
use crate::record::{Dtype, HiddenStates};

/// The reply's content type.
pub const ARROW_STREAM: &str = "application/vnd.apache.arrow.stream";

/// Marks the start of a message, and with a length of zero the end of the stream.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Arrow's advice for buffer offsets in a body: 64 bytes, for SIMD readers of a mapped file.
const ALIGNMENT: usize = 64;
static PADDING: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// The stream as chunks to send one after the other. The rows are shared, not copied.
///
/// # Errors
/// [`Error::BrokenStream`] when Arrow refuses the schema, which a valid record rules out.
pub fn encode_stream(states: &HiddenStates, model: &str) -> Result<Vec<Bytes>, Error> {
    let header = || -> Result<Vec<u8>, ArrowError> {
        let schema = schema_of(states, model);
        let mut out = StreamWriter::try_new(Vec::new(), &schema)?.get_ref().clone();
        put_batch_header(&mut out, states);
        Ok(out)
    };
    let header =
        header().map_err(|source| Error::BrokenStream { origin: "the encoder".into(), source })?;
    let mut chunks = vec![Bytes::from(header)];
    for &id in &states.layer_ids {
        let rows = states.layer_bytes(id).cloned().unwrap_or_default();
        let padding = padded(rows.len()) - rows.len();
        chunks.push(rows);
        if padding > 0 {
            chunks.push(Bytes::from_static(&PADDING[..padding]));
        }
    }
    chunks.push(Bytes::from_static(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]));
    Ok(chunks)
}

/// Reads a whole stream back. The record's layers are slices of `body` when the stream holds one
/// batch, as ours does; several batches are joined, which copies once.
///
/// # Errors
/// [`Error::BrokenStream`] for what is cut short or not an Arrow stream, [`Error::Incomplete`] and
/// [`Error::Shape`] for an Arrow stream of other content; each names `origin`.
pub fn decode_stream(body: Bytes, origin: &str) -> Result<HiddenStates, Error> {
    let broken = |source| Error::BrokenStream { origin: origin.to_owned(), source };
    let mut decoder = StreamDecoder::new();
    let mut rest = Buffer::from(body);
    let mut batches = Vec::new();
    while !rest.is_empty() {
        batches.extend(decoder.decode(&mut rest).map_err(broken)?);
    }
    decoder.finish().map_err(broken)?;
    let schema = decoder.schema().ok_or_else(|| incomplete(origin, "a schema"))?;
    let facts = StreamFacts::read(&schema, origin)?;
    let tokens = batches.iter().map(RecordBatch::num_rows).sum();
    let layers = (0..facts.layer_ids.len())
        .map(|column| rows_of(&batches, column).ok_or_else(|| incomplete(origin, "plain rows")))
        .collect::<Result<Vec<_>, _>>()?;
    HiddenStates::new(facts.layer_ids, tokens, facts.hidden_size, facts.dtype, layers)
}

fn incomplete(origin: &str, missing: &'static str) -> Error {
    Error::Incomplete { origin: origin.to_owned(), missing }
}

fn schema_of(states: &HiddenStates, model: &str) -> Schema {
    let width = i32::try_from(states.row_bytes()).expect("a row is shorter than 2 GiB");
    let column = |id: &u32| Field::new(column_name(*id), DataType::FixedSizeBinary(width), false);
    let fields: Vec<Field> = states.layer_ids.iter().map(column).collect();
    let metadata = HashMap::from([
        ("dtype".to_owned(), states.dtype.name().to_owned()),
        ("layer_ids".to_owned(), format!("{:?}", states.layer_ids)),
        ("hidden_size".to_owned(), states.hidden_size.to_string()),
        ("model".to_owned(), model.to_owned()),
    ]);
    Schema::new_with_metadata(fields, metadata)
}

fn column_name(id: u32) -> String {
    format!("layer_{id}")
}

fn padded(length: usize) -> usize {
    length.next_multiple_of(ALIGNMENT)
}

/// Appends the message that announces one batch; its body, the padded rows, follows separately.
fn put_batch_header(out: &mut Vec<u8>, states: &HiddenStates) {
    let message = batch_message(states);
    // The prefix of 8 bytes counts: the body starts on a multiple of 8.
    let length = (message.len() + 8).next_multiple_of(8) - 8;
    out.extend(CONTINUATION);
    out.put_i32_le(i32::try_from(length).expect("a header is a few kilobytes"));
    out.extend(&message);
    out.resize(out.len() + length - message.len(), 0);
}

/// The flatbuffer of a batch whose columns each have an absent validity buffer and their rows.
fn batch_message(states: &HiddenStates) -> Vec<u8> {
    let rows = states.tokens as i64;
    let bytes = states.tokens * states.row_bytes();
    let stride = padded(bytes);
    let columns = states.layer_ids.len();
    let nodes: Vec<_> = (0..columns).map(|_| ipc::FieldNode::new(rows, 0)).collect();
    let buffers: Vec<_> = (0..columns)
        .map(|column| (column * stride) as i64)
        .flat_map(|at| [ipc::Buffer::new(at, 0), ipc::Buffer::new(at, bytes as i64)])
        .collect();
    let mut builder = FlatBufferBuilder::new();
    let nodes = builder.create_vector(&nodes);
    let buffers = builder.create_vector(&buffers);
    let mut batch = ipc::RecordBatchBuilder::new(&mut builder);
    batch.add_length(rows);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    let batch = batch.finish().as_union_value();
    let mut message = ipc::MessageBuilder::new(&mut builder);
    message.add_version(ipc::MetadataVersion::V5);
    message.add_header_type(ipc::MessageHeader::RecordBatch);
    message.add_bodyLength((columns * stride) as i64);
    message.add_header(batch);
    let message = message.finish();
    builder.finish(message, None);
    builder.finished_data().to_vec()
}

/// What the schema says about the rows.
struct StreamFacts {
    layer_ids: Vec<u32>,
    hidden_size: usize,
    dtype: Dtype,
}

impl StreamFacts {
    fn read(schema: &Arc<Schema>, origin: &str) -> Result<Self, Error> {
        let get = |key: &'static str| {
            schema.metadata().get(key).map(String::as_str).ok_or_else(|| incomplete(origin, key))
        };
        let dtype = Dtype::from_name(get("dtype")?).ok_or_else(|| incomplete(origin, "dtype"))?;
        let hidden_size =
            get("hidden_size")?.parse().map_err(|_| incomplete(origin, "hidden_size"))?;
        let layer_ids: Vec<u32> =
            serde_json::from_str(get("layer_ids")?).map_err(|_| incomplete(origin, "layer_ids"))?;
        let facts = Self { layer_ids, hidden_size, dtype };
        facts.check_columns(schema, origin)?;
        Ok(facts)
    }

    fn check_columns(&self, schema: &Arc<Schema>, origin: &str) -> Result<(), Error> {
        let names: Vec<_> = schema.fields().iter().map(|field| field.name().clone()).collect();
        let expected: Vec<_> = self.layer_ids.iter().map(|&id| column_name(id)).collect();
        let width = self.hidden_size * self.dtype.size();
        let fits = |field: &Arc<Field>| matches!(field.data_type(), DataType::FixedSizeBinary(n) if *n as usize == width);
        if names == expected && schema.fields().iter().all(fits) {
            return Ok(());
        }
        Err(Error::Shape {
            origin: origin.to_owned(),
            expected: format!("columns {expected:?} of {width} bytes a row"),
            got: format!("columns {names:?}"),
        })
    }
}

/// A column's bytes over all batches; `None` when it has nulls.
fn rows_of(batches: &[RecordBatch], column: usize) -> Option<Bytes> {
    let mut parts = batches.iter().map(|batch| {
        let array = batch.column(column).as_fixed_size_binary_opt()?;
        let bytes = array.len() * array.value_length() as usize;
        (array.null_count() == 0).then(|| Bytes::from(array.values().slice_with_length(0, bytes)))
    });
    let first = parts.next().unwrap_or_else(|| Some(Bytes::new()))?;
    if batches.len() <= 1 {
        return Some(first);
    }
    let mut joined = BytesMut::from(first);
    for part in parts {
        joined.extend_from_slice(&part?);
    }
    Some(joined.freeze())
}

#[cfg(test)]
mod tests {
    use arrow::array::FixedSizeBinaryArray;

    use super::*;
    use crate::tests::sample;

    fn joined(chunks: &[Bytes]) -> Bytes {
        chunks.concat().into()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for (tokens, hidden) in [(1, 3), (7, 16), (64, 32), (0, 4)] {
            let states = sample(&[0, 2, 9], tokens, hidden);
            let body = joined(&encode_stream(&states, "tiny").unwrap());
            assert_eq!(decode_stream(body, "test").unwrap(), states, "{tokens} x {hidden}");
        }
    }

    #[test]
    fn rows_are_neither_copied_out_nor_in() {
        let states = sample(&[1, 4], 8, 32);
        let chunks = encode_stream(&states, "tiny").unwrap();
        assert!(chunks.iter().any(|chunk| chunk.as_ptr() == states.layer(1).unwrap().as_ptr()));
        let body = joined(&chunks);
        let back = decode_stream(body.clone(), "test").unwrap();
        assert!(body.as_ptr_range().contains(&back.layer(4).unwrap().as_ptr()));
    }

    /// The same content through Arrow's own writer, in two batches.
    fn written_by_arrow(states: &HiddenStates, metadata: HashMap<String, String>) -> Bytes {
        let schema = Schema::clone(&schema_of(states, "tiny"));
        let schema = Arc::new(Schema::new_with_metadata(schema.fields, metadata));
        let mut writer = StreamWriter::try_new(Vec::new(), &schema).unwrap();
        let split = states.tokens / 2 * states.row_bytes();
        for part in 0..2 {
            let column = |id: &u32| {
                let (head, tail) = states.layer(*id).unwrap().split_at(split);
                let bytes = Buffer::from([head, tail][part]);
                let width = states.row_bytes() as i32;
                Arc::new(FixedSizeBinaryArray::new(width, bytes, None)) as _
            };
            let columns = states.layer_ids.iter().map(column).collect();
            writer.write(&RecordBatch::try_new(schema.clone(), columns).unwrap()).unwrap();
        }
        writer.into_inner().unwrap().into()
    }

    #[test]
    fn streams_of_several_batches_are_joined() {
        let states = sample(&[2, 3], 9, 5);
        let body = written_by_arrow(&states, schema_of(&states, "tiny").metadata.into());
        assert_eq!(decode_stream(body, "test").unwrap(), states);
    }

    #[test]
    fn arrow_s_reader_takes_our_batch_whole() {
        let states = sample(&[2, 3], 9, 5);
        let body = joined(&encode_stream(&states, "tiny").unwrap());
        let mut reader = ipc::reader::StreamReader::try_new(&body[..], None).unwrap();
        assert_eq!(reader.schema().metadata()["layer_ids"], "[2, 3]");
        let batch = reader.next().unwrap().unwrap();
        let column = batch.column_by_name("layer_3").unwrap().as_fixed_size_binary();
        assert_eq!(column.value(8), &states.layer(3).unwrap()[80..]);
        assert!(reader.next().is_none());
    }

    #[test]
    fn every_cut_is_noticed() {
        let body = joined(&encode_stream(&sample(&[2], 3, 8), "tiny").unwrap());
        // Without its end marker a stream is still whole for Arrow; HTTP's length covers that.
        for length in 0..body.len() - 8 {
            let found = decode_stream(body.slice(..length), "test");
            assert!(found.is_err() || found.unwrap().tokens == 0, "cut at {length}");
        }
        let mut noise = body.to_vec();
        noise[..200].fill(0x5a);
        assert!(matches!(decode_stream(noise.into(), "test"), Err(Error::BrokenStream { .. })));
    }

    #[test]
    fn other_arrow_streams_are_refused_by_name() {
        let states = sample(&[2], 4, 5);
        let good = schema_of(&states, "tiny").metadata;
        let change = |key: &str, value: &str| {
            let mut metadata: HashMap<String, String> = good.clone().into();
            metadata.insert(key.into(), value.into());
            decode_stream(written_by_arrow(&states, metadata), "there").unwrap_err().to_string()
        };
        assert!(change("dtype", "int8").contains("without dtype"));
        assert!(change("layer_ids", "2;3").contains("without layer_ids"));
        assert!(change("layer_ids", "[7]").contains("expected columns [\"layer_7\"]"));
        assert!(change("hidden_size", "6").contains("12 bytes a row"));
        let bare = decode_stream(written_by_arrow(&states, HashMap::new()), "there");
        assert!(matches!(bare, Err(Error::Incomplete { missing: "dtype", .. })));
    }
}
