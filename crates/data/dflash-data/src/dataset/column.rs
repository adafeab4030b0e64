//! A list column inside one record batch, read row by row.

use arrow_data::layout;
use arrow_ipc as ipc;
use arrow_schema::{DataType, Schema};

use super::Shard;
use crate::error::Error;

/// Which of a batch's nodes and buffers belong to a list column, and how to read them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    name: &'static str,
    node: usize,
    buffer: usize,
    wide_offsets: bool,
    item: Item,
}

/// How one list item is stored.
#[derive(Debug, Clone, Copy)]
enum Item {
    Bit,
    /// An integer of `width` bytes.
    Integer {
        width: usize,
        signed: bool,
    },
}

/// The column's position in its file, for one batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnSlice {
    column: Column,
    offsets: u64,
    values: u64,
}

impl Column {
    /// Finds the column in the schema of `shard`.
    pub(super) fn find(shard: &Shard, schema: &Schema, name: &'static str) -> Result<Self, Error> {
        let mut place = (0, 0);
        for field in schema.fields() {
            let data_type = field.data_type();
            if field.name() == name {
                let (wide_offsets, item) = list_item(data_type).ok_or_else(|| {
                    let found = data_type.to_string();
                    Error::ColumnType { path: shard.path.clone(), column: name, found }
                })?;
                return Ok(Self { name, node: place.0, buffer: place.1, wide_offsets, item });
            }
            let (nodes, buffers) = extent(data_type).ok_or_else(|| {
                shard.broken(format!("cannot skip column {} of {data_type}", field.name()))
            })?;
            place = (place.0 + nodes, place.1 + buffers);
        }
        let found: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        Err(Error::NoColumn { path: shard.path.clone(), column: name, found: found.join(", ") })
    }

    /// Places the column in the batch whose body starts at `body`.
    pub(super) fn locate(
        &self,
        shard: &Shard,
        batch: ipc::RecordBatch<'_>,
        body: u64,
    ) -> Result<ColumnSlice, Error> {
        let short = || shard.broken("a record batch lacks buffers");
        let nodes = batch.nodes().ok_or_else(short)?;
        let buffers = batch.buffers().ok_or_else(short)?;
        // A list has a validity and an offsets buffer, its items a validity and a values buffer.
        if nodes.len() < self.node + 2 || buffers.len() < self.buffer + 4 {
            return Err(short());
        }
        if nodes.get(self.node).null_count() > 0 || nodes.get(self.node + 1).null_count() > 0 {
            return Err(Error::Nulls { path: shard.path.clone(), column: self.name });
        }
        let at = |index: usize| body + buffers.get(self.buffer + index).offset() as u64;
        Ok(ColumnSlice { column: *self, offsets: at(1), values: at(3) })
    }
}

impl ColumnSlice {
    /// Items of each of the batch's first `rows` rows.
    pub(super) fn lengths(&self, shard: &Shard, rows: usize) -> Result<Vec<u32>, Error> {
        if rows == 0 {
            return Ok(Vec::new());
        }
        let offsets = self.read_offsets(shard, 0, rows + 1)?;
        offsets
            .windows(2)
            .map(|pair| pair[1].checked_sub(pair[0]).and_then(|length| u32::try_from(length).ok()))
            .collect::<Option<_>>()
            .ok_or_else(|| shard.broken("list offsets do not ascend"))
    }

    pub(super) fn read_row(&self, shard: &Shard, row: usize) -> Result<Vec<i64>, Error> {
        let offsets = self.read_offsets(shard, row, 2)?;
        let (start, count) = (offsets[0], (offsets[1] - offsets[0]) as usize);
        match self.column.item {
            Item::Integer { width, signed } => {
                let bytes = shard.read_at(self.values + start * width as u64, count * width)?;
                Ok(bytes.chunks_exact(width).map(|item| little_endian(item, signed)).collect())
            }
            Item::Bit => {
                let first = (start % 8) as usize;
                let bytes = shard.read_at(self.values + start / 8, (first + count).div_ceil(8))?;
                let bit = |index: usize| i64::from(bytes[index / 8] >> (index % 8) & 1);
                Ok((first..first + count).map(bit).collect())
            }
        }
    }

    fn read_offsets(&self, shard: &Shard, first: usize, count: usize) -> Result<Vec<u64>, Error> {
        let width = if self.column.wide_offsets { 8 } else { 4 };
        let bytes = shard.read_at(self.offsets + (first * width) as u64, count * width)?;
        Ok(bytes.chunks_exact(width).map(|item| little_endian(item, false) as u64).collect())
    }
}

/// An integer of up to eight little-endian bytes.
fn little_endian(bytes: &[u8], signed: bool) -> i64 {
    let fill = if signed && bytes.last().is_some_and(|high| high & 0x80 != 0) { 0xff } else { 0 };
    let mut wide = [fill; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(wide)
}

/// Whether the offsets are wide, and the items' storage; `None` for other types.
fn list_item(data_type: &DataType) -> Option<(bool, Item)> {
    let (wide, item) = match data_type {
        DataType::List(item) => (false, item),
        DataType::LargeList(item) => (true, item),
        _ => return None,
    };
    let item = match item.data_type() {
        DataType::Boolean => Item::Bit,
        integer if integer.is_integer() => {
            Item::Integer { width: integer.primitive_width()?, signed: integer.is_signed_integer() }
        }
        _ => return None,
    };
    Some((wide, item))
}

/// Field nodes and buffers that a column takes in a record batch (Arrow columnar format,
/// "Recordbatch message"); `None` for types whose number of buffers varies.
fn extent(data_type: &DataType) -> Option<(usize, usize)> {
    let children: Vec<&DataType> = match data_type {
        DataType::Union(..) | DataType::RunEndEncoded(..) => return None,
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => vec![item.data_type()],
        DataType::Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        // A dictionary-encoded column stores its indices.
        _ => Vec::new(),
    };
    let own = layout(data_type);
    if own.variadic {
        return None;
    }
    let own_buffers = own.buffers.len() + usize::from(own.can_contain_null_mask);
    children.into_iter().try_fold((1, own_buffers), |(nodes, buffers), child| {
        let (more_nodes, more_buffers) = extent(child)?;
        Some((nodes + more_nodes, buffers + more_buffers))
    })
}
