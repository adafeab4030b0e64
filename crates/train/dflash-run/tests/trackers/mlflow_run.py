"""Prints the run that MLflow's own client finds in a file store: name, status, params, metrics."""

import json
import os
import pathlib
import sys

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

from mlflow import MlflowClient

client = MlflowClient(pathlib.Path(sys.argv[1]).resolve().as_uri())
(run,) = client.search_runs(["0"])
history = {
    tag: [[item.step, item.value, item.timestamp] for item in client.get_metric_history(run.info.run_id, tag)]
    for tag in run.data.metrics
}
print(
    json.dumps(
        {
            "name": run.info.run_name,
            "status": run.info.status,
            "start": run.info.start_time,
            "end": run.info.end_time,
            "params": run.data.params,
            "metrics": history,
        }
    )
)
