"""Prints the records that wandb's own reader (0.19) finds in a log: one JSON object a line."""

import json
import sys

import wandb
from google.protobuf.json_format import MessageToDict
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

wandb._assert_is_internal_process = True
store = DataStore()
store.open_for_scan(sys.argv[1])
while (data := store.scan_data()) is not None:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    assert record.SerializeToString() == data, "a field that wandb does not know"
    print(json.dumps(MessageToDict(record, preserving_proto_field_name=True)))
