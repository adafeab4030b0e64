"""Writes an event file with TensorBoard's own writer; see README.md."""

import sys

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

writer = EventFileWriter(sys.argv[1])
for step, values in [(10, {"train/loss": 3.5}), (20, {"train/loss": 2.25, "train/lr": 0.0006})]:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
    writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=summary))
writer.close()
