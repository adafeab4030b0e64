"""Prints the scalars that TensorBoard finds in a directory: {tag: [[step, value], ...]}."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[item.step, item.value] for item in events.Scalars(tag)] for tag in tags}))
