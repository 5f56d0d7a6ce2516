"""Trains a small GPT on bytes of text, on any number of ranks, and survives what happens to them.

    python examples/train_gpt.py --steps 20 --checkpoints /tmp/gpt
    transom submit --nodes 4 --spares 1 -- python examples/train_gpt.py --steps 2000

The text is the source code of Python's standard library, which every machine has; `--text FILE` takes another.
Only the four lines that mention `ckpt` or `state` in `main` have to do with surviving. On CPUs, a run that was
stopped and resumed, however often, ends with bitwise the weights of one that was not.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import transom_hpc as transom


class Block(nn.Module):
    """Attention over the bytes before, then a layer of its own for each place."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(heads.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Gives, for each byte of a text, scores for the byte after it."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self.start_small)
        self.head.weight = self.bytes.weight  # reading and writing share one table

    @staticmethod
    def start_small(part: nn.Module) -> None:
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Windows:
    """Deals out the windows of a text in a new random order each epoch: each once, to every rank its share.

    What is kept is how many windows all ranks together have taken, so it resumes on any number of ranks.
    """

    def __init__(self, count: int, batch: int, rank: int, world_size: int, seed: int) -> None:
        self.count, self.batch, self.rank, self.world_size, self.seed = count, batch, rank, world_size, seed
        self.taken = 0
        self.epoch, self.order = -1, torch.empty(0)

    def next(self) -> list[int]:
        """The windows of this rank's next batch. All ranks call it once a step."""
        first = self.taken + self.rank
        self.taken += self.batch * self.world_size
        return [self.window(number) for number in range(first, self.taken, self.world_size)]

    def window(self, number: int) -> int:
        epoch, place = divmod(number, self.count)
        if epoch != self.epoch:
            shuffle = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.count, generator=shuffle)
        return int(self.order[place])

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def read_text(file: Path | None) -> torch.Tensor:
    """The bytes to learn: the same, in the same order, on every host with this version of Python."""
    files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2, help="windows a rank and step")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=64, help="bytes that a window has")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each rank")
    parser.add_argument("--text", type=Path, help="learn this file, not the standard library")
    parser.add_argument("--checkpoints", type=Path, help="where to save; inside a run, the run knows")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="inside a run, the run knows")
    parser.add_argument("--final", type=Path, help="write the weights here at the end")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="S", help="slow each step down, to watch it")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(args.threads)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms(True), without its import of a compiler

    torch.manual_seed(args.seed)
    model: nn.Module = GPT(args.layers, args.width, args.heads, args.context, args.dropout)
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    text = read_text(args.text)
    sampler = Windows((len(text) - 1) // args.context, args.batch, rank, world_size, args.seed)
    torch.manual_seed(args.seed + rank)  # every rank drops out other units

    def loss_of(windows: list[int]) -> torch.Tensor:
        rows = torch.stack([text[w * args.context : (w + 1) * args.context + 1] for w in windows]).long()
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def train_step() -> float:
        opt.zero_grad()
        loss = loss_of(sampler.next())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    # DistributedDataParallel sorts its gradient buckets anew after its first backward pass, and with them the order in
    # which the gradients of three or more ranks are added up. One pass that is thrown away puts that behind us, so that
    # the first step after a resume adds as the same step of an undisturbed run does.
    loss_of([0]).backward()

    ckpt = transom.Checkpointer.from_env(directory=args.checkpoints, every=args.save_every)
    state: dict[str, Any] = {"model": model, "optimizer": opt, "rng": transom.rng_state(), "data": sampler}
    start = ckpt.restore(state)
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"{size:,} parameters, {world_size} ranks, {len(text):,} bytes of text: from step {start}", flush=True)
    loss, since = float("nan"), time.monotonic()
    for step in range(start, args.steps):
        loss = train_step()
        time.sleep(args.sleep)
        ckpt.step(step + 1, state, loss=loss)
        if rank == 0 and (step + 1) % args.print_every == 0:
            each = (time.monotonic() - since) / min(args.print_every, step + 1 - start)
            print(f"step {step + 1}  loss {loss:.4f}  {each:.3f} s a step", flush=True)
            since = time.monotonic()
    ckpt.close()

    if rank == 0:
        print(f"done: step {args.steps}, loss {loss:.4f}")
        if args.final:
            unfinished = args.final.with_name(f".{args.final.name}.tmp")
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            with unfinished.open("wb") as file:  # by name, torch would write the name into the file
                torch.save(inner.state_dict(), file)
            unfinished.replace(args.final)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
