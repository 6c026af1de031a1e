"""Training steps of a Llama over several GPUs: FSDP2 divides the weights, torch's context parallelism the sequence.

    torchrun --standalone --nproc-per-node 4 benchmarks/train_llama.py [--length 131072] [--rounds 5] [--write FILE]
    torchrun --standalone --nproc-per-node 4 benchmarks/train_llama.py --train 1000 --checkpoint DIR --every 100
    torchrun --standalone --nproc-per-node 2 benchmarks/train_llama.py --trial      by gloo on the CPU, a tiny model

The first prints tokens a second with attngen's attention and with torch's, which take turns: steps of AdamW, 8 of the 32
layers of a Llama 3 of 8B, random weights and tokens, bf16 with fp32 weights in the optimizer. What a layer computes around its
attention is computed again in the backward; the attention is not. A time is the slowest process's.

The second trains by attngen and prints the loss of each step. It saves a checkpoint after every so many steps, and begins
after the last one in DIR: the same command goes on after an interruption. With `--deterministic` a step has the same bits in
every run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from cell import CUDNN
from markers import write_between
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from words import markdown

from attngen.bench.peers import first_line
from attngen.bench.sweep import where
from attngen.torch import activated

ROPE_BASE = 500000.0
LEARNING_RATE, LARGEST_NORM = 3e-4, 1.0
ROWS_OF_LOGITS = 4096  # rows whose logits are computed together: those of all rows would not fit
WAITING = timedelta(minutes=10)  # how long a process waits for another, which may compile the kernels of the first step
FLASH = "torch flash"
Attention = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Sizes:
    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


LLAMA = Sizes(128256, 4096, 14336, 8, 32, 8, 128)
TINY = Sizes(64, 32, 64, 2, 4, 2, 8)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.head_dim = sizes.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        self.q, self.o = linear(sizes.width, sizes.heads * sizes.head_dim), linear(sizes.heads * sizes.head_dim, sizes.width)
        self.k, self.v = (linear(sizes.width, sizes.kv_heads * sizes.head_dim) for _ in range(2))
        self.gate, self.up = (linear(sizes.width, sizes.hidden) for _ in range(2))
        self.down = linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = checkpoint(self.before, x, cosines, sines, use_reentrant=False)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = checkpoint(self.after, x, attended, use_reentrant=False)
        return result

    def before(self, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [batch, heads, rows, head_dim]."""
        x = self.attention_norm(x)
        q, k, v = (layer(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return rotated(q, cosines, sines), rotated(k, cosines, sines), v.contiguous()

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width, eps=1e-5), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """The mean cross-entropy of tokens and targets [batch, rows], which are at these positions [rows] of the sequence."""
        frequencies = ROPE_BASE ** -(torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim)
        angles = positions[:, None] * frequencies
        x, cosines, sines = self.tokens(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosines, sines)
        parts = zip(x.split(ROWS_OF_LOGITS, 1), targets.split(ROWS_OF_LOGITS, 1), strict=True)
        losses = [checkpoint(self.loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / targets.numel()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes, a grid: each row has a batch of its own, and divides its sequence among `context` processes."""

    device: torch.device
    all: Any  # meshes
    context: Any
    batch: int  # the row of this process

    @classmethod
    def joined(cls, on_gpu: bool, context: int | None) -> Processes:
        """The processes that torchrun started, by the variables that it sets."""
        local = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=WAITING, device_id=device if on_gpu else None)
        count = dist.get_world_size()
        context = context or count
        mesh = partial(dist.device_mesh.init_device_mesh, device.type)
        grid = mesh((count // context, context), mesh_dim_names=("data", "context"))
        return cls(device, mesh((count,)), grid["context"], grid["data"].get_local_rank())

    def slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def mean(self, number: Tensor) -> float:
        number = number.detach().clone()
        dist.all_reduce(number)
        return float(number / dist.get_world_size())


class Training:
    """A model whose weights all processes share out, and its optimizer."""

    def __init__(self, sizes: Sizes, length: int, processes: Processes) -> None:
        self.sizes, self.length, self.processes = sizes, length, processes
        torch.manual_seed(0)
        with torch.device(processes.device):
            self.model = Llama(sizes)
        if processes.device.type == "cuda":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)  # tables of RoPE stay fp32
        else:
            policy = MixedPrecisionPolicy()
        for block in self.model.blocks:
            fully_shard(block, mesh=processes.all, mp_policy=policy)
        fully_shard(self.model, mesh=processes.all, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.steps = 0

    def step(self, attention: Attention) -> tuple[float, float]:
        """(loss, norm of the gradient) of one step."""
        buffers = list(data(self.sizes, self.length, self.steps, self.processes.batch, self.processes.device))
        with attention(), context_parallel(self.processes.context, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            loss = self.model(*buffers)
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return self.processes.mean(loss), float(norm.full_tensor())

    def save(self, directory: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "steps": self.steps}
        checkpoints.save(state, checkpoint_id=directory / f"step-{self.steps}")

    def resume(self, directory: Path) -> None:
        """Loads the last checkpoint that is complete, if there is one; torch writes `.metadata` last."""
        saved = [int(found.parent.name.removeprefix("step-")) for found in directory.glob("step-*/.metadata")]
        if not saved:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "steps": 0}
        checkpoints.load(state, checkpoint_id=directory / f"step-{max(saved)}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["steps"]


def data(sizes: Sizes, length: int, step: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens [1, length] of one batch of a step, what follows each, and positions [length]."""
    generator = torch.Generator().manual_seed(1000 * step + batch)
    tokens = torch.randint(sizes.vocabulary, (1, length), generator=generator).to(device)
    return tokens, tokens.roll(-1, 1), torch.arange(length, device=device)


def alone(sizes: Sizes, length: int) -> tuple[float, float]:
    """(loss, norm of the gradient) of the first step of one process on the CPU, by torch's attention."""
    torch.manual_seed(0)
    model = Llama(sizes)
    loss = model(*data(sizes, length, 0, 0, torch.device("cpu")))
    loss.backward()
    return float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM))


def refusal(training: Training, attention: Attention) -> str:
    """Why torch's plan cannot use an attention; "" if it can."""
    sizes, processes = training.sizes, training.processes
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    options = {"device": processes.device, "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(1, each, 256, sizes.head_dim, **options) for each in heads]
    rows = torch.zeros(2 * processes.context.size(), device=processes.device)  # the plan divides something at least
    try:
        with attention(), context_parallel(processes.context, buffers=[rows], buffer_seq_dims=[0]):
            functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).sum().backward()
    except RuntimeError as error:
        return first_line(error)
    return ""


def measured(training: Training, rounds: int) -> list[dict[str, Any]]:
    """A row for each attention, which take turns."""
    sides: dict[str, Attention] = {
        "attngen": activated,
        FLASH: lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        CUDNN: lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    }
    rows: dict[str, dict[str, Any]] = {}
    for name, attention in list(sides.items()):
        if reason := refusal(training, attention):
            rows[name] = {"attention": name, "refused": reason}
            del sides[name]
        else:
            training.step(attention)  # compiles
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            torch.cuda.synchronize()
            dist.barrier(device_ids=[training.processes.device.index])
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            loss, _ = training.step(sides[name])
            torch.cuda.synchronize()
            times[name].append(training.processes.slowest(time.perf_counter() - begin))
            memory = torch.cuda.max_memory_allocated() / 1e9
            rows[name] = {"attention": name, "loss": loss, "memory": memory}
    sequences = dist.get_world_size() // training.processes.context.size()
    for name, found in times.items():
        rows[name] |= {"seconds": median(found), "tokens": sequences * training.length / median(found)}
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    titles = ("attention", "seconds a step", "tokens a second", "attngen's, times", "GB of a GPU", "loss of its last step")
    ran = [row for row in rows if "refused" not in row]
    ours = next((row["tokens"] for row in ran if row["attention"] == "attngen"), float("nan"))
    lines = [
        (
            row["attention"], f"{row['seconds']:.3f}", f"{row['tokens']:.0f}", f"{ours / row['tokens']:.3f}",
            f"{row['memory']:.0f}", f"{row['loss']:.3f}",
        )
        for row in ran
    ]  # fmt: skip
    refused = "".join(f"\n\nNot run: {row['attention']}: {row['refused']}." for row in rows if "refused" in row)
    return markdown(titles, lines) + refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, help="tokens of a sequence  [default: 131072, of a trial 64]")
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument("--context", type=int, help="processes that share a sequence  [default: all]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", type=int, metavar="STEPS", help="train until so many steps were made, and print each loss")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a directory that all nodes share")
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--trial", action="store_true", help="a tiny model on the CPU, by gloo; trains, 1 step by default")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("launch this by torchrun: torchrun --standalone --nproc-per-node 2 benchmarks/train_llama.py --trial")
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    sizes = TINY if options.trial else Sizes(**{**{n: getattr(LLAMA, n) for n in LLAMA.__slots__}, "layers": options.layers})
    length = options.length or (64 if options.trial else 131072)
    processes = Processes.joined(not options.trial, options.context)
    training = Training(sizes, length, processes)
    is_first = dist.get_rank() == 0
    if options.trial or options.train:
        train(training, options, is_first)
    else:
        rows = measured(training, options.rounds)
        if is_first:
            text = table(rows)
            print(text)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
            if options.write:
                place = f"{dist.get_world_size()} times {where()}, {length} tokens, {options.rounds} rounds"
                write_between(options.write, "train_llama", f"{place}\n\n{text}")
    dist.destroy_process_group()


def train(training: Training, options: argparse.Namespace, is_first: bool) -> None:
    attention = partial(activated, emulated=True) if options.trial else activated
    if options.checkpoint:
        training.resume(options.checkpoint)
    if options.trial and is_first and training.steps == 0:
        loss, norm = alone(training.sizes, training.length)
        print(json.dumps({"step": "the first, of one process", "loss": loss, "norm": norm}), flush=True)
    while training.steps < (options.train or 1):
        step = training.steps
        loss, norm = training.step(attention)
        if is_first:
            print(json.dumps({"step": step, "loss": loss, "norm": norm}), flush=True)
        if options.checkpoint and training.steps % options.every == 0:
            training.save(options.checkpoint)


if __name__ == "__main__":
    main()
