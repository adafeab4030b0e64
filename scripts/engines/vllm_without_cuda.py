"""Lets vLLM's connector of hidden states run where there is no GPU: it records CUDA events, waits on CUDA streams and
pins memory whatever the platform. On a CPU all is done when a call returns, so these may do nothing.

Installed as `sitecustomize` by vllm_setup.py; it acts when the connector is imported, and then only without a GPU.
"""

import contextlib
import sys

CONNECTOR = "example_hidden_states_connector"


class Done:
    """An event that has happened, or a stream that has nothing left to do."""

    def __init__(self, *_args, **_kwargs):
        pass

    def query(self):
        return True

    def _nothing(self, *_args, **_kwargs):
        pass

    record = wait = synchronize = wait_event = wait_stream = _nothing


def act_without_cuda():
    import torch

    if torch.cuda.is_available():
        return
    torch.cuda.Event = torch.cuda.Stream = Done
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()
    empty_like = torch.empty_like

    def unpinned(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return empty_like(*args, **kwargs)

    torch.empty_like = unpinned


class Watch:
    """A finder of modules that finds none, and sees which are looked for."""

    def find_spec(self, name, _path=None, _target=None):
        if name.rpartition(".")[2] == CONNECTOR:
            sys.meta_path.remove(self)
            act_without_cuda()
        return None


sys.meta_path.insert(0, Watch())
