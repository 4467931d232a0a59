"""Pieces about processes: children, threads and signals of one rank, and what two ranks say to each other."""

from __future__ import annotations

import random

from pieces import Piece, maker


@maker
def processes(chance: random.Random) -> Piece:
    """Children that do not use the device, threads that do, signals, cycles that the collector finds."""
    setup = ["import gc, os, signal, subprocess, sys, threading, weakref", "kept = torch.arange(8.0, device=device)",
             "class Data(torch.utils.data.Dataset):", "    def __len__(self): return 6",
             "    def __getitem__(self, index): return torch.full((2,), float(index))"]  # fmt: skip
    forms = (
        ["child = os.fork()", "if child == 0: os._exit(7)", "say(step, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"],
        ["found = []", "def work(): found.append((kept * step).sum().item())",
         "threads = [threading.Thread(target=work) for _ in range(2)]", "for one in threads: one.start()",
         "for one in threads: one.join()", "say(step, found)"],
        ["found = []", "def look(*_): found.append(1)", "signal.signal(signal.SIGUSR1, look)",
         "os.kill(os.getpid(), signal.SIGUSR1)", "say(step, kept.sum().item(), len(found))"],
        ["a = [kept.clone()]", "a.append(a)", "ref = weakref.ref(a[0])", "del a", "gc.collect()", "say(step, ref() is None)"],
        ["for x in torch.utils.data.DataLoader(Data(), 2, num_workers=step % 2, generator=torch.Generator()): say(step, x.to(device) * 2)"],
        ["x = torch.ones(3, pin_memory=on_device).to(device, non_blocking=True)", "say(step, x * kept[:3])"],
        ["with torch.device(device): x = torch.arange(step)", "say(step, x.sum())"],
        ["if on_device:", "    stream = torch.cuda.Stream()", "    stream.wait_stream(torch.cuda.current_stream())",
         "    with torch.cuda.stream(stream): x = kept * 2", "    torch.cuda.current_stream().wait_stream(stream)",
         "else: x = kept * 2", "say(step, x)"],
        ["kept = kept.roll(1)", "if on_device: torch.cuda.synchronize()", "say(step, kept[0].item())"],
        ["say(step, subprocess.run([sys.executable, '-S', '-c', 'print(5)'], capture_output=True).stdout)"],
        ["import io", "file = io.BytesIO()", "torch.save({'x': kept, 'step': step}, file)", "file.seek(0)",
         "kept = torch.load(file, map_location=device, weights_only=True)['x'] + 1", "say(step, kept)"],
        ["if on_device: torch.cuda.empty_cache()", "say(step, kept.sum())"],
        ["import pickle", "say(step, pickle.loads(pickle.dumps(kept)))"],
    )  # fmt: skip
    step = [line for form in chance.sample(forms, chance.randint(1, 3)) for line in form]
    return Piece("processes", tuple(setup), tuple(step), ("say('final', kept)",))


@maker
def collectives(chance: random.Random) -> Piece:
    """All kinds, begun early and waited for late, across steps too; objects; messages."""
    setup = ["group = dist.new_group()", "peer = 1 - rank", "t = torch.arange(4.0, device=device) + rank",
             "pending = []", "def number(value): return torch.full((3,), float(value), device=device)"]  # fmt: skip
    forms = (
        ["dist.all_reduce(t)", "t /= 2", "say(step, t)"],
        ["work = dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True)", "x = number(step).sum().item()", "work.wait()",
         "say(step, t, x)"],
        ["for work, x in pending: work.wait(); say(step, 'late', x)", "pending.clear()", "x = number(rank + step)",
         "pending.append((dist.all_reduce(x, group=group, async_op=True), x))"],
        ["parts = [torch.empty_like(t) for _ in range(2)]", "dist.all_gather(parts, t)", "say(step, *parts)"],
        ["out = torch.empty(8, dtype=t.dtype, device=device)", "dist.all_gather_into_tensor(out, t)", "say(step, out)"],
        ["dist.broadcast(t, step % 2)", "say(step, t)", "t = t + rank"],
        ["dist.reduce(t, 0, op=dist.ReduceOp.SUM)", "say(step, t if rank == 0 else 0)", "t = torch.arange(4.0, device=device) + rank"],
        ["found = [None, None]", "dist.all_gather_object(found, {'rank': rank, 'at': 'x' * (step * 7)})", "say(step, found)"],
        ["found = [step if rank == 0 else None, t.cpu() if rank == 0 else None]", "dist.broadcast_object_list(found, 0)", "say(step, *found)"],
        ["x = number(step)", "if rank == 0: dist.send(x, 1)", "else: dist.recv(x, 0)", "say(step, x)"],
        ["x, y = number(rank + step), number(-1)", "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])",
         "for work in works: work.wait()", "say(step, y)"],
        ["y = number(-1)", "work = dist.irecv(y, peer)", "dist.isend(number(rank * step), peer).wait()", "work.wait()", "say(step, y)"],
        ["dist.barrier()", "say(step, 'barrier')"],
        ["dist.monitored_barrier() if not on_device else dist.barrier()", "say(step, 'barrier')"],
        ["parts = [t * 0, t * 2] if rank == 0 else None", "x = torch.empty_like(t)", "dist.scatter(x, parts, src=0)", "say(step, x)"],
        ["parts = [torch.empty_like(t) for _ in range(2)] if rank == 1 else None", "dist.gather(t, parts, dst=1)", "say(step, *(parts or ()))"],
        ["x = torch.arange(4, device=device) * (rank + 1)", "dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)", "say(step, x)"],
        ["x = torch.tensor([True, rank == 0], device=device).to(torch.uint8)", "dist.all_reduce(x, op=dist.ReduceOp.MIN)", "say(step, x)"],
        ["if step % 3 == 1: group = dist.new_group([0, 1])", "x = number(1)", "dist.all_reduce(x, group=group)", "say(step, x)"],
        ["try: dist.all_reduce(None)", "except Exception as error: caught(step, error)"],
        ["x = number(float('inf') if rank else float('nan'))", "dist.all_reduce(x)", "say(step, x)"],
        ["x = torch.empty(0, device=device)", "dist.all_reduce(x)", "say(step, x)"],
        ["x = torch.ones(2, 3, device=device).t() * rank", "dist.all_reduce(x)", "say(step, x)"],
        ["x, y = number(rank), torch.empty(6, device=device)", "dist.all_to_all_single(y, torch.cat([x, x + 1]))", "say(step, y)"],
    )  # fmt: skip
    chosen = chance.sample(forms, chance.randint(1, 5))
    step = [line for form in chosen for line in form]
    final = ("for work, x in pending: work.wait(); say('late', x)", "say('final', t)")
    return Piece("collectives", tuple(setup), tuple(step), final, 2)
