//! Walking the messages of an Arrow IPC stream file without reading its data.

use std::os::unix::fs::FileExt;

use arrow_ipc::{self as ipc, MessageHeader};

use super::Shard;
use super::column::{Column, ColumnSlice};
use crate::error::Error;

/// Announces a message since Arrow 0.15; older files start with the length itself.
const CONTINUATION: u32 = u32::MAX;

/// The two columns of a record batch, with their positions in the shard.
#[derive(Debug)]
pub(super) struct Columns {
    pub(super) rows: usize,
    pub(super) input_ids: ColumnSlice,
    pub(super) loss_mask: ColumnSlice,
}

/// All record batches of a shard, in order.
pub(super) fn scan_shard(shard: &Shard) -> Result<Vec<Columns>, Error> {
    let read = |source| Error::Read { path: shard.path.clone(), source };
    let size = shard.file.metadata().map_err(read)?.len();
    let mut batches = Vec::new();
    let mut columns: Option<SampleColumns> = None;
    let mut position = 0;
    while let Some((metadata, body)) = next_metadata(shard, position, size)? {
        let message = ipc::root_as_message(&metadata)
            .map_err(|error| shard.broken(format!("a message header is invalid ({error})")))?;
        position = body + u64::try_from(message.bodyLength()).unwrap_or(0);
        if position > size {
            return Err(shard.broken("it ends inside a record batch"));
        }
        match message.header_type() {
            MessageHeader::Schema => columns = Some(read_schema(shard, &message)?),
            MessageHeader::RecordBatch => {
                let columns =
                    columns.as_ref().ok_or_else(|| shard.broken("no schema comes first"))?;
                batches.push(read_batch(shard, &message, columns, body)?);
            }
            // Dictionaries belong to columns that are not read.
            _ => {}
        }
    }
    if columns.is_none() {
        return Err(shard.broken("it holds no schema"));
    }
    Ok(batches)
}

/// The message header at `position` and where its body starts; `None` at the end of the stream.
fn next_metadata(shard: &Shard, position: u64, size: u64) -> Result<Option<(Vec<u8>, u64)>, Error> {
    let word = |at: u64| {
        let mut bytes = [0; 4];
        shard.file.read_exact_at(&mut bytes, at).map(|()| u32::from_le_bytes(bytes)).ok()
    };
    if position == size {
        return Ok(None);
    }
    let cut = || shard.broken("it ends inside a message header");
    let first = word(position).ok_or_else(cut)?;
    let (length, start) = match first {
        CONTINUATION => (word(position + 4).ok_or_else(cut)?, position + 8),
        length => (length, position + 4),
    };
    if length == 0 {
        return Ok(None);
    }
    let body = start + u64::from(length);
    if body > size {
        return Err(cut());
    }
    Ok(Some((shard.read_at(start, length as usize)?, body)))
}

/// Where the two columns are among those of the schema.
struct SampleColumns {
    input_ids: Column,
    loss_mask: Column,
}

fn read_schema(shard: &Shard, message: &ipc::Message<'_>) -> Result<SampleColumns, Error> {
    let header =
        message.header_as_schema().ok_or_else(|| shard.broken("the schema has no header"))?;
    let schema = ipc::convert::try_fb_to_schema(header)
        .map_err(|error| shard.broken(format!("the schema is invalid ({error})")))?;
    Ok(SampleColumns {
        input_ids: Column::find(shard, &schema, "input_ids")?,
        loss_mask: Column::find(shard, &schema, "loss_mask")?,
    })
}

fn read_batch(
    shard: &Shard,
    message: &ipc::Message<'_>,
    columns: &SampleColumns,
    body: u64,
) -> Result<Columns, Error> {
    let batch = message
        .header_as_record_batch()
        .ok_or_else(|| shard.broken("a record batch has no header"))?;
    if batch.compression().is_some() {
        return Err(shard.broken("its buffers are compressed"));
    }
    Ok(Columns {
        rows: usize::try_from(batch.length()).unwrap_or(0),
        input_ids: columns.input_ids.locate(shard, batch, body)?,
        loss_mask: columns.loss_mask.locate(shard, batch, body)?,
    })
}
