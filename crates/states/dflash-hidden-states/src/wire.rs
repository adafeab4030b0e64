//! The body of a reply: an Arrow IPC stream with one column per layer, one row per token.
//!
//! Columns are `FixedSizeBinary(hidden_size * element size)` named `layer_{id}`; the schema's
//! metadata holds `dtype`, `layer_ids` (a JSON list), `hidden_size` and `model`. Any Arrow reader
//! can read it. Arrow's own writer would copy every row into a message body; since our columns are
//! plain byte ranges, the record batch's header is built here and the rows are sent unchanged.

use std::collections::HashMap;

use arrow_ipc as ipc;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema};
use bytes::{BufMut, Bytes};
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
/// [`Error::Encode`] if Arrow refuses the schema, which cannot happen for a valid record.
pub fn encode_stream(states: &HiddenStates, model: &str) -> Result<Vec<Bytes>, Error> {
    let header = || -> Result<Vec<u8>, ArrowError> {
        let schema = schema_of(states, model);
        let mut out = StreamWriter::try_new(Vec::new(), &schema)?.get_ref().clone();
        put_batch_header(&mut out, states);
        Ok(out)
    };
    let header = header().map_err(Error::Encode)?;
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

/// Reads a whole stream. The record's layers are slices of `body` if the stream holds one batch, as
/// ours does; several batches are joined, which copies once.
///
/// # Errors
/// [`Error::BrokenStream`] if it is truncated or not such a stream; it names `origin`.
pub fn decode_stream(body: Bytes, origin: &str) -> Result<HiddenStates, Error> {
    Ok(decode(body, origin)?.0)
}

/// As [`decode_stream`], with the stream's model name.
pub(crate) fn decode(body: Bytes, origin: &str) -> Result<(HiddenStates, String), Error> {
    let broken = |Flaw(reason)| Error::BrokenStream { origin: origin.to_owned(), reason };
    read_stream(body).map_err(broken)
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

/// Why bytes are not a valid stream.
struct Flaw(&'static str);

/// Arrow's own reader panics on damaged offsets and on unknown types, so the few messages of a
/// stream are read here. The flatbuffers verifier checks their structure, and every range is
/// checked.
fn read_stream(body: Bytes) -> Result<(HiddenStates, String), Flaw> {
    let mut messages = Messages { rest: body };
    let (header, _) = messages.next()?.ok_or(Flaw("it is empty"))?;
    let facts = StreamFacts::read(&parsed(&header)?)?;
    let (mut tokens, mut batches) = (0usize, Vec::new());
    while let Some((header, body)) = messages.next()? {
        let (rows, columns) = facts.batch(&parsed(&header)?, &body)?;
        tokens = tokens.checked_add(rows).ok_or(Flaw("it has too many rows"))?;
        batches.push(columns);
    }
    if !messages.rest.is_empty() {
        return Err(Flaw("it goes on after its end"));
    }
    let layers = (0..facts.layer_ids.len()).map(|column| joined(&batches, column)).collect();
    let StreamFacts { layer_ids, hidden_size, dtype, model } = facts;
    let states = HiddenStates::new(layer_ids, tokens, hidden_size, dtype, layers);
    Ok((states.map_err(|_| Flaw("its rows are not what its schema says"))?, model))
}

/// Header and body of one message after another, up to the end marker.
struct Messages {
    rest: Bytes,
}

impl Messages {
    fn next(&mut self) -> Result<Option<(Bytes, Bytes)>, Flaw> {
        if self.take(4)? != CONTINUATION[..] {
            return Err(Flaw("a message does not begin where it should"));
        }
        let length = self.take(4)?;
        let length = i32::from_le_bytes(length[..].try_into().expect("four bytes"));
        let header = self.take(i64::from(length))?;
        if header.is_empty() {
            return Ok(None);
        }
        let length = parsed(&header)?.bodyLength();
        let body = self.take(length)?;
        Ok(Some((header, body)))
    }

    fn take(&mut self, length: i64) -> Result<Bytes, Flaw> {
        match usize::try_from(length) {
            Ok(length) if length <= self.rest.len() => Ok(self.rest.split_to(length)),
            _ => Err(Flaw("it is cut short")),
        }
    }
}

fn parsed(header: &[u8]) -> Result<ipc::Message<'_>, Flaw> {
    ipc::root_as_message(header).map_err(|_| Flaw("a message's header is broken"))
}

/// The schema's information about the rows.
struct StreamFacts {
    layer_ids: Vec<u32>,
    hidden_size: usize,
    dtype: Dtype,
    model: String,
}

impl StreamFacts {
    fn read(message: &ipc::Message<'_>) -> Result<Self, Flaw> {
        let schema = message.header_as_schema().ok_or(Flaw("it does not begin with a schema"))?;
        let metadata = schema.custom_metadata().unwrap_or_default();
        let get = |key: &str| metadata.iter().find(|pair| pair.key() == Some(key))?.value();
        let dtype = get("dtype").and_then(Dtype::from_name);
        let dtype = dtype.ok_or(Flaw("its metadata is without dtype"))?;
        let hidden_size = get("hidden_size").and_then(|text| text.parse().ok());
        let hidden_size = hidden_size.ok_or(Flaw("its metadata is without hidden_size"))?;
        let layer_ids = get("layer_ids").and_then(|text| serde_json::from_str(text).ok());
        let layer_ids = layer_ids.ok_or(Flaw("its metadata is without layer_ids"))?;
        let model = get("model").ok_or(Flaw("its metadata is without model"))?.to_owned();
        let facts = Self { layer_ids, hidden_size, dtype, model };
        if schema.endianness() == ipc::Endianness::Little && facts.are_columns(&schema) {
            Ok(facts)
        } else {
            Err(Flaw("its columns are not the layers of its metadata"))
        }
    }

    fn are_columns(&self, schema: &ipc::Schema<'_>) -> bool {
        let fields = schema.fields().unwrap_or_default();
        let is_column = |(field, &id): (ipc::Field<'_>, &u32)| {
            let kind = field.type_as_fixed_size_binary();
            let width = kind.and_then(|kind| usize::try_from(kind.byteWidth()).ok());
            let plain = field.dictionary().is_none();
            plain && field.name() == Some(&column_name(id)) && width == self.width()
        };
        fields.len() == self.layer_ids.len() && fields.iter().zip(&self.layer_ids).all(is_column)
    }

    /// Bytes of a row of one layer.
    fn width(&self) -> Option<usize> {
        self.hidden_size.checked_mul(self.dtype.size()).filter(|&width| width > 0)
    }

    /// The rows of a batch, column by column.
    fn batch(&self, message: &ipc::Message<'_>, body: &Bytes) -> Result<(usize, Vec<Bytes>), Flaw> {
        let batch = message.header_as_record_batch().ok_or(Flaw("a message is not a batch"))?;
        let nodes = batch.nodes().unwrap_or_default();
        let buffers = batch.buffers().unwrap_or_default();
        let rows = usize::try_from(batch.length()).map_err(|_| Flaw("a batch has no length"))?;
        let whole = nodes.iter().all(|n| n.length() == batch.length() && n.null_count() == 0);
        let columns = self.layer_ids.len();
        if !whole || nodes.len() != columns || buffers.len() != 2 * columns {
            return Err(Flaw("a batch does not have a row of each layer for each token"));
        }
        if batch.compression().is_some() {
            return Err(Flaw("a batch is compressed"));
        }
        let bytes = self.width().and_then(|width| width.checked_mul(rows));
        let column = |column: usize| {
            let rows = buffers.get(2 * column + 1);
            let start = usize::try_from(rows.offset()).ok()?;
            let end = start.checked_add(usize::try_from(rows.length()).ok()?)?;
            (Some(end - start) == bytes && end <= body.len()).then(|| body.slice(start..end))
        };
        let columns = (0..columns).map(column).collect::<Option<_>>();
        Ok((rows, columns.ok_or(Flaw("the rows of a layer are not within its batch"))?))
    }
}

/// One column of all batches; shared if there is only one batch.
fn joined(batches: &[Vec<Bytes>], column: usize) -> Bytes {
    match batches {
        [batch] => batch[column].clone(),
        batches => batches.iter().flat_map(|batch| batch[column].iter().copied()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::cast::AsArray;
    use arrow_array::{FixedSizeBinaryArray, RecordBatch};
    use arrow_buffer::Buffer;
    use dflash_test_support::random;

    use super::*;
    use crate::tests::sample;

    fn whole(chunks: &[Bytes]) -> Bytes {
        chunks.concat().into()
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for (tokens, hidden) in [(1, 3), (7, 16), (64, 32), (0, 4)] {
            let states = sample(&[0, 2, 9], tokens, hidden);
            let body = whole(&encode_stream(&states, "tiny").unwrap());
            assert_eq!(decode_stream(body, "test").unwrap(), states, "{tokens} x {hidden}");
        }
    }

    #[test]
    fn rows_are_neither_copied_out_nor_in() {
        let states = sample(&[1, 4], 8, 32);
        let chunks = encode_stream(&states, "tiny").unwrap();
        assert!(chunks.iter().any(|chunk| chunk.as_ptr() == states.layer(1).unwrap().as_ptr()));
        let body = whole(&chunks);
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
        let body = whole(&encode_stream(&states, "tiny").unwrap());
        let mut reader = ipc::reader::StreamReader::try_new(&body[..], None).unwrap();
        assert_eq!(reader.schema().metadata()["layer_ids"], "[2, 3]");
        let batch = reader.next().unwrap().unwrap();
        let column = batch.column_by_name("layer_3").unwrap().as_fixed_size_binary();
        assert_eq!(column.value(8), &states.layer(3).unwrap()[80..]);
        assert!(reader.next().is_none());
    }

    #[test]
    fn every_cut_is_noticed() {
        let body = whole(&encode_stream(&sample(&[2], 3, 8), "tiny").unwrap());
        for length in 0..body.len() {
            assert!(decode_stream(body.slice(..length), "test").is_err(), "cut at {length}");
        }
        let longer = [&body[..], &[0]].concat();
        assert!(decode_stream(longer.into(), "test").is_err());
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
        assert!(change("layer_ids", "[7]").contains("not the layers of its metadata"));
        assert!(change("hidden_size", "6").contains("not the layers of its metadata"));
        let bare = decode_stream(written_by_arrow(&states, HashMap::new()), "there").unwrap_err();
        assert!(bare.to_string().contains("there sent a broken stream"), "{bare}");
    }

    #[test]
    fn damage_that_no_digest_covers_never_panics() {
        let mut random = random();
        let states = sample(&[2, 3, 7], 9, 5);
        let bodies = [
            whole(&encode_stream(&states, "tiny").unwrap()),
            written_by_arrow(&states, schema_of(&states, "tiny").metadata.into()),
        ];
        let mut refused = 0;
        for round in 0..20_000 {
            let body = crate::tests::damaged(&bodies[round % 2], &mut random);
            match decode_stream(body.into(), "test") {
                Err(_) => refused += 1,
                Ok(read) => {
                    let bytes = read.tokens * read.row_bytes();
                    assert!(
                        read.layer_ids.iter().all(|&id| read.layer(id).unwrap().len() == bytes)
                    );
                }
            }
        }
        assert!(refused > 5_000, "{refused}");
    }
}
