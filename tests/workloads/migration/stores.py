"""What scripts do with the default store and with groups, on two ranks below relays."""

import datetime
import os

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
store = dist.distributed_c10d._get_default_store()
store.set(f"from-{rank}", str(rank))
assert store.get(f"from-{1 - rank}") == str(1 - rank).encode()
total = store.add("sum", rank + 1)
assert total in (1, 2, 3), total
dist.barrier()
assert store.add("sum", 0) == 3
winner = store.compare_set("winner", "", str(rank))
dist.barrier()
assert store.get("winner") == winner or winner in (b"0", b"1")
assert store.check(["winner"]) and not store.check(["nobody"])
try:
    store.wait(["nobody"], datetime.timedelta(milliseconds=50))
    raise SystemExit("nobody came, and wait did not say so")
except dist.DistStoreError as error:
    assert "nobody" in str(error), error
assert store.delete_key(f"from-{rank}")
group = dist.new_group([0, 1])
x = torch.full((3,), float(rank + 1), device="cuda")
dist.all_reduce(x, group=group)
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
assert gathered == [{"rank": 0}, {"rank": 1}], gathered
assert x.tolist() == [3.0] * 3
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
targets = [os.readlink(link) for link in links if os.path.lexists(link)]
assert not [target for target in targets if target.startswith(("socket:", "pipe:"))], targets
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} is content\n", end="", flush=True)  # in one piece: both ranks write
