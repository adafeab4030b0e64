"""The Hub's official client on a repository: client.py download|upload REPOSITORY DIRECTORY.

`download` fetches all of it, loads its card, and prints both as JSON; `upload` commits the directory.
"""

import hashlib
import json
import sys
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, hf_hub_download, snapshot_download


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def download(repository, directory):
    root = Path(snapshot_download(repository, local_dir=directory))
    files = {
        str(path.relative_to(root)): digest(path)
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".cache" not in path.parts
    }
    single = {name: digest(hf_hub_download(repository, name)) for name in files}
    assert single == files, (single, files)
    card = ModelCard.load(repository)
    results = [
        [it.task_type, it.dataset_type, it.dataset_name, it.metric_type, it.metric_value]
        for it in card.data.eval_results or []
    ]
    data = {key: value for key, value in card.data.to_dict().items() if key != "model-index"}
    info = HfApi().model_info(repository)
    print(json.dumps({"files": files, "data": data, "results": results, "private": info.private}))


def upload(repository, directory):
    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    print(api.upload_folder(repo_id=repository, folder_path=directory, commit_message="by the client"))


{"download": download, "upload": upload}[sys.argv[1]](sys.argv[2], sys.argv[3])
