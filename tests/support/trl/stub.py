"""A distribution named vllm with what TRL imports of it: a group over gloo, and tensors in packs."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "vllm/__init__.py": '__version__ = "0.31.0"\n\n\nclass LLM: ...\n\n\nRequestOutput = SamplingParams = LLM\n',
    "vllm/sampling_params.py": "class StructuredOutputsParams: ...\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": """
import socket


def get_ip():
    return "127.0.0.1"


def get_open_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
""",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": """
from datetime import timedelta

from torch import distributed as dist


class Group:
    # TRL drops group.group.store at its end.

    def __init__(self, gloo, store):
        self.gloo, self.store, self.group = gloo, store, self


def trainer_init(info):
    size, timeout = info["world_size"], timedelta(seconds=60)
    store = dist.TCPStore(info["master_address"], info["master_port"], size, True, timeout, use_libuv=False)
    return Group(dist.ProcessGroupGloo(dist.PrefixStore("weights", store), 0, size, timeout), store)
""",
    "vllm/distributed/weight_transfer/packed_tensor.py": """
import torch
from torch import distributed as dist


def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func, buffer_size_bytes=2**30):
    pack = []

    def send():
        group.gloo.broadcast([torch.cat(pack)], dist.BroadcastOptions()).wait()
        pack.clear()

    for item in iterator:
        pack.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, pack)) > buffer_size_bytes:
            send()
    if pack:
        send()
""",
    "vllm-0.31.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n",
}


def write_stub(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
