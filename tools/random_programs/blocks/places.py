"""Blocks that read and write at places: gathers, scatters, sorts, running extremes, tables."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("rows tokens", weight=1.0)
def scattered(d: Draw) -> Block:
    """Reductions by an index that the data give."""
    size = d.size()
    dim = d.pick(-1, -1, 0, 1)
    length = "x.shape[0]" if dim == 0 else f"x.shape[{dim}]"
    index = f"(x.detach().sigmoid() * {length}).long().clamp(max={length} - 1)"
    made = d.pick(
        f"torch.zeros_like(x).scatter_add({dim}, index, x)",
        f"x.scatter_reduce({dim}, index, x * 0.5, 'amax')",
        f"x.scatter_reduce({dim}, index, x, 'mean', include_self=False)",
        f"torch.ones_like(x).scatter_reduce({dim}, index, x.tanh(), 'prod')",
        f"x.gather({dim}, index)",
        f"x + x.gather({dim}, index).cumsum({dim}) / 8",
        f"torch.take_along_dim(x, index, {dim})",
        f"x.scatter({dim}, index[:1] if x.dim() == 2 else index[:, :1], 0.25)",
    )
    if d.flag(0.3) and len(d.shape) == 1:
        setup = f"self.table = nn.Parameter(torch.randn({size}, {d.last}))"
        forward = f"""
        index = (x[:, 0].detach().sigmoid() * {size}).long().clamp(max={size - 1})
        sums = torch.zeros_like(self.table).index_add(0, index, x.to(self.table.dtype))
        counts = F.one_hot(index, {size}).sum(0).to(x.dtype)
        return x + (self.table + sums / (1 + counts.unsqueeze(-1)))[index]"""
        return Block(setup, forward, d.shape)
    return Block("", f"index = {index}\n        return {made}", d.shape)


@block("rows tokens", weight=0.8)
def indexed(d: Draw) -> Block:
    """Advanced indices, alone and beside slices, read and written."""
    places = d.rng.choices(range(d.last), k=d.rng.randint(1, d.last))
    own = sorted(set(places))
    setup = f'self.register_buffer("places", torch.tensor({own}))'
    line = d.pick(
        "y[..., self.places] = y[..., self.places] * 2",
        "y[..., self.places] += 1.0",
        "y.index_copy_(-1, self.places, x[..., self.places].tanh())",
        "y.index_fill_(-1, self.places, 0.5)",
        "y = y.index_add(-1, self.places, x[..., self.places])",
        "y[0, ..., self.places] = 0.0",
        "y[torch.arange(y.shape[0]), ..., -1] = y[:, ..., 0]",
        "y = torch.where(F.one_hot(self.places, y.shape[-1]).sum(0).bool(), y, -y)",
        "y[y > 0.5] = 0.5",
        "y[x.detach()[..., 0] > 0] = 0.1",
        "y = y.masked_scatter(y > 5.0, x)",
        "y.put_(self.places, x.flatten()[self.places])",
        "y = y + y.take(self.places).sum()",
    )
    return Block(setup, f"y = x * 1.0\n        {line}\n        return y", d.shape)


@block("rows tokens", weight=0.8)
def ranked(d: Draw) -> Block:
    """Order statistics and running extremes along any dimension."""
    dim = d.pick(-1, -1, 0, 1)
    made = d.pick(
        f"x + x.sort(dim={dim}, stable=True, descending={d.flag()}).values",
        f"x - x.kthvalue(1, {dim}, keepdim=True).values",
        f"x - x.quantile(0.3, {dim}, keepdim=True)",
        f"x - x.nanmedian({dim}, keepdim=True).values",
        f"x + x.cummin({dim}).values",
        f"x + x.tanh().cumprod({dim})",
        f"x * x.argsort({dim}).argsort({dim}).to(x.dtype) / x.shape[{dim}]",
        f"x + F.pad(x.diff(dim=-1), (1, 0)) + x.amin({dim}, keepdim=True)",
        f"x + torch.stack(x.aminmax(dim={dim}, keepdim=True)).sum(0)",
        f"x + x.topk(1, {dim}, largest={d.flag()}).values",
        "x + torch.searchsorted(x.detach().sort(-1).values.contiguous(), x.detach().contiguous()).to(x.dtype) / 8",
        f"x.renorm(2, {d.pick(0, 1)}, 1.0)",
        f"x + x.logcumsumexp({dim}) / 4",
        f"x - x.std({dim}, keepdim=True, unbiased=False) + x.nansum({dim}, keepdim=True) / 9",
    )
    return Block("", f"return {made}", d.shape)


@block("tokens", weight=0.8)
def tables(d: Draw) -> Block:
    """Embeddings with options, of ids that the data give."""
    width, size = d.last, d.pick(3, 5, 8)
    ids = f"(x[..., 0].detach().sigmoid() * {size}).long().clamp(max={size - 1})"
    setup, made = d.pick(
        (f"nn.Embedding({size}, {width}, padding_idx=0)", f"self.table({ids})"),
        (f"nn.Embedding({size}, {width}, padding_idx=-1)", f"self.table({ids})"),
        (f"nn.Embedding({size}, {width}, scale_grad_by_freq=True)", f"self.table({ids})"),
        (
            f"nn.EmbeddingBag({size}, {width}, mode='sum')",
            f"self.table({ids}, per_sample_weights=x[..., -1]).unsqueeze(1)",
        ),
        (
            f"nn.EmbeddingBag({size}, {width}, mode='mean', padding_idx=1)",
            f"self.table({ids}).unsqueeze(1)",
        ),
        (
            f"nn.EmbeddingBag({size}, {width}, mode='mean')",
            f"self.table({ids}.flatten(), torch.arange(x.shape[0]) * x.shape[1]).unsqueeze(1)",
        ),
    )
    return Block(f"self.table = {setup}", f"return x + {made}", d.shape)


@block("rows", weight=0.6)
def queue(d: Draw) -> Block:
    """A buffer of the last rows, moved on by every step (MoCo); and one that keeps extremes."""
    size = d.pick(2, 3, 5, 8)
    setup = f"""
        self.register_buffer("queue", torch.zeros({size}, {d.last}))
        self.register_buffer("largest", torch.full(({d.last},), -1.0))
        self.register_buffer("seen", torch.zeros({d.last}, dtype=torch.bool))"""
    write = d.pick(
        "self.queue.copy_(torch.cat([x.detach(), self.queue])[: self.queue.shape[0]])",
        "self.queue = torch.cat([x.detach()[:1], self.queue[:-1]])",
        "self.queue[0] = x.detach().mean(0)",
        "self.queue.copy_(self.queue.roll(1, 0)).mul_(0.5)",
    )
    forward = f"""
        y = x @ self.queue.clone().t() @ self.queue.clone() / {size} + x
        {write}
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        self.seen |= (x.detach() > 1.0).any(0)
        return y / (2 + self.largest) + self.seen.to(x.dtype)"""
    return Block(setup, forward, d.shape)
