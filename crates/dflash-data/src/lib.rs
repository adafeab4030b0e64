//! Prepared datasets: row schema, shards, packing, anchors and resumable order.
