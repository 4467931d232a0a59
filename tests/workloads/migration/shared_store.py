"""A rank that meets the others at the store of env://, and tells what connections it holds then."""

import json
import os
import sys

import psutil
import torch.distributed as dist
import torch.distributed.rendezvous  # noqa: F401

from understudy.proxy_client import proxyd_store

proxyd_store.install(sys.modules["torch.distributed.rendezvous"])  # as in any worker below a relay

made, rank, world = next(dist.rendezvous("env://"))
store = dist.PrefixStore("as init_process_group does it", made)
store.set(f"from {rank}", f"hello of {rank}")
total = store.add("total", rank + 1)
store.wait([f"from {peer}" for peer in range(world)])
heard = [store.get(f"from {peer}").decode() for peer in range(world)]
store.add("heard", 1)
while store.add("heard", 0) < world:
    pass
connections = [str(one) for one in psutil.Process().net_connections("inet")]
answer = {"heard": heard, "total": store.add("total", 0), "connections": connections}
with open(os.path.join(sys.argv[1], f"rank-{rank}"), "w") as file:
    json.dump(answer, file)
