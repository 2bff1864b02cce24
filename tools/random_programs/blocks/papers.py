"""Parts of well-known models that are no plain layers: masks from data, latents, windows, spectra, ensembles, teachers."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("tokens", weight=1.5)
def padded_attention(d: Draw) -> Block:
    """Keys that the data mask, as of padding; some see none but the first."""
    heads, width = d.pick(1, 2, 3), d.pick(2, 3, 4)
    setup = f"""
        self.qkv = nn.Linear({d.last}, {3 * heads * width})
        self.out = nn.Linear({heads * width}, {d.last})"""
    causal = (
        "keep = keep & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()"
        if d.flag()
        else ""
    )
    weighted = d.pick(
        "y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)",
        f"y = (q @ k.mT / {width} ** 0.5).masked_fill(~keep, -1e9).softmax(-1) @ v",
        f"y = (q @ k.mT / {width} ** 0.5 + torch.where(keep, 0.0, float('-inf'))).softmax(-1) @ v",
        f"y = F.softmax((q @ k.mT / {width} ** 0.5).where(keep, torch.finfo(x.dtype).min), -1) @ v",
    )
    forward = f"""
        keep = x[..., 0].detach() > -0.5
        keep = torch.cat([torch.ones_like(keep[:, :1]), keep[:, 1:]], 1)[:, None, None, :]
        {causal}
        q, k, v = self.qkv(x).unflatten(-1, (3, {heads}, {width})).permute(2, 0, 3, 1, 4)
        {weighted}
        return x + self.out(y.transpose(1, 2).flatten(2))"""
    return Block(setup, forward, d.shape)


@block("tokens")
def latents(d: Draw) -> Block:
    """Learned queries read all tokens (Perceiver)."""
    count = d.pick(1, 2, 3, 5)
    setup = f"""
        self.latents = nn.Parameter(torch.randn({count}, {d.last}))
        self.keys = nn.Linear({d.last}, {2 * d.last}, bias={d.flag()})"""
    forward = d.pick(
        """
        k, v = self.keys(x).chunk(2, -1)
        q = self.latents.expand(x.shape[0], -1, -1)
        return q + F.scaled_dot_product_attention(q, k, v)""",
        """
        k, v = self.keys(x).chunk(2, -1)
        weights = torch.einsum('md,ntd->nmt', self.latents, k).softmax(-1)
        return torch.einsum('nmt,ntd->nmd', weights, v)""",
    )
    return Block(setup, forward, (count, d.last))


@block("tokens")
def relative_positions(d: Draw) -> Block:
    """A bias for each distance and head, read from a table (T5, Swin)."""
    heads = d.divisor(d.last)
    t, width = d.shape[0], d.last // heads
    setup = f"""
        self.table = nn.{d.pick(f"Embedding({2 * t - 1}, {heads})", f"Parameter(torch.randn({2 * t - 1}, {heads}))")}
        self.qkv = nn.Linear({d.last}, {3 * d.last}, bias=False)
        i = torch.arange({t})
        self.register_buffer("distance", i[:, None] - i + {t - 1}, persistent={d.flag()})"""
    look = "self.table(self.distance)" if "Embedding" in setup else "self.table[self.distance]"
    forward = f"""
        q, k, v = (z.unflatten(-1, ({heads}, {width})).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        bias = {look}.permute(2, 0, 1)
        y = (q @ k.mT + bias[None]).softmax(-1) @ v
        return x + y.transpose(1, 2).reshape(x.shape)"""
    return Block(setup, forward, d.shape)


@block("tokens")
def windows(d: Draw) -> Block:
    """Attention inside of windows, which may be shifted (Swin)."""
    size = d.divisor(d.shape[0])
    shift = d.pick(0, size // 2)
    forward = f"""
        y = x.roll(-{shift}, 1).reshape(-1, {size}, x.shape[-1])
        y = F.scaled_dot_product_attention(y, self.keys(y), y)
        return x + y.reshape(x.shape).roll({shift}, 1)"""
    return Block(f"self.keys = nn.Linear({d.last}, {d.last})", forward, d.shape)


@block("tokens", weight=0.8)
def decoder_layer(d: Draw) -> Block:
    heads, width = d.divisor(d.last), d.size()
    setup = f"self.layer = nn.TransformerDecoderLayer({d.last}, {heads}, {width}, dropout={d.dropout}, batch_first=True)"
    return Block(
        setup, f"return self.layer(x, {d.pick('x.flip(1)', 'x[:, :1]', 'x.detach()')})", d.shape
    )


@block("tokens", weight=0.8)
def spectrum(d: Draw) -> Block:
    """Some frequencies, each with a matrix (FNO)."""
    kept = d.rng.randint(1, d.shape[0] // 2 + 1)
    setup = f"self.weight = nn.Parameter(torch.randn({kept}, {d.last}, {d.last}, 2, dtype=torch.float64) / {d.last})"
    forward = f"""
        f = torch.fft.rfft(x.double(), dim=1, norm="ortho")[:, :{kept}]
        f = torch.einsum('nki,kio->nko', f, torch.view_as_complex(self.weight))
        return x + torch.fft.irfft(f, x.shape[1], dim=1, norm="ortho").to(x.dtype)"""
    return Block(setup, forward, d.shape)


@block("rows", weight=0.8)
def crossed(d: Draw) -> Block:
    """Products of features (DCN, factorization machines)."""
    rank = d.pick(1, 2, 3)
    setup = f"""
        self.fc = nn.Linear({d.last}, {d.last})
        self.factors = nn.Parameter(torch.randn({d.last}, {rank}) / 3)"""
    forward, size = d.pick(
        ("return x * self.fc(x) + x", d.last),
        ("return ((x @ self.factors).square() - x.square() @ self.factors.square()) / 2", rank),
        ("return (x[:, :, None] * self.factors).flatten(1)", d.last * rank),
        ("return torch.triu(x[:, :, None] * self.fc(x)[:, None], 1).flatten(1)", d.last**2),
    )
    return Block(setup, forward, (size,))


@block("rows", weight=0.7)
def bags(d: Draw) -> Block:
    """Sums of rows of a table."""
    size, width, mode = d.size(), d.size(), d.pick("sum", "mean", "max")
    setup = f"self.table = nn.EmbeddingBag({size}, {width}, mode={mode!r})"
    forward = f"""
        near = (x.detach().sigmoid() * {size}).long().clamp(max={size - 1})
        return self.table(near) * x.mean(-1, keepdim=True)"""
    return Block(setup, forward, (width,))


@block("rows tokens", weight=0.7)
def ensemble(d: Draw) -> Block:
    """Several models at once."""
    count, width = d.pick(2, 3, 4), d.size()
    setup = f"self.weights = nn.Parameter(torch.randn({count}, {d.last}, {width}) / 2)"
    forward = d.pick(
        "return torch.vmap(lambda w: torch.tanh(x @ w))(self.weights).mean(0)",
        "return torch.stack([torch.tanh(x @ w) for w in self.weights]).mean(0)",
        "return torch.tanh(torch.einsum('...i,kio->...ko', x, self.weights)).amax(-2)",
        "return torch.tanh(x.unsqueeze(0) @ (self.weights if x.dim() == 2 else self.weights.unsqueeze(1))).logsumexp(0)",
    )
    return Block(setup, forward, d.with_last(width))


@block("rows", weight=0.6)
def slope(d: Draw) -> Block:
    """The gradient of an energy with respect to positions."""
    width = d.size()
    setup = f"self.fc = nn.Linear({d.last}, {width})"
    forward = """
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = torch.tanh(self.fc(at)).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return x - force"""
    return Block(setup, forward, d.shape)


@block("rows tokens", weight=0.7)
def teacher(d: Draw) -> Block:
    """A copy of the weight that follows it slowly, as a buffer (BYOL)."""
    setup = f"""
        self.fc = nn.Linear({d.last}, {d.last}, bias=False)
        self.register_buffer("copy", self.fc.weight.detach().clone())"""
    write = d.pick(
        "self.copy.lerp_(self.fc.weight.detach(), 0.1)",
        "self.copy = 0.9 * self.copy + 0.1 * self.fc.weight.detach()",
    )
    forward = f"""
        y = self.fc(x)
        {write}
        return y, (y - F.linear(x, self.copy).detach()).square().mean()"""
    return Block(setup, forward, d.shape, auxiliary=True)


@block("rows", weight=0.6)
def counted_codes(d: Draw) -> Block:
    """How often each code was nearest, and the mean of its rows, as buffers (VQ-VAE)."""
    size = d.size()
    setup = f"""
        self.register_buffer("codes", torch.randn({size}, {d.last}))
        self.register_buffer("counts", torch.zeros({size}))"""
    forward = """
        near = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = F.one_hot(near, len(self.codes)).to(x.dtype)
        y = x + (self.codes[near] - x).detach() * 0.5
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.copy_(self.codes * 0.9 + 0.1 * chosen.t() @ x.detach() / (1 + self.counts.unsqueeze(-1)))
        return y"""
    return Block(setup, forward, d.shape)


@block(weight=0.5)
def hooked(d: Draw) -> Block:
    """The gradient is changed on its way."""
    change = d.pick("g * 0.5", "g.clamp(-0.1, 0.1)", "g + 0.01")
    forward = f"""
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda g: {change})
        return y"""
    return Block("", forward, d.shape)


@block("images", weight=0.8)
def turned(d: Draw) -> Block:
    """Sampled on a grid that the image itself gives (spatial transformers)."""
    setup = f"self.angles = nn.Linear({d.shape[0]}, 6)"
    forward = """
        theta = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype) + 0.1 * torch.tanh(self.angles(x.mean((2, 3))))
        grid = F.affine_grid(theta.view(-1, 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)"""
    return Block(setup, forward, d.shape)


@block("images", weight=0.8)
def channels_last(d: Draw) -> Block:
    setup = f"self.conv = nn.Conv2d({d.shape[0]}, {d.shape[0]}, 3, padding=1)"
    return Block(
        setup, "return self.conv(x.contiguous(memory_format=torch.channels_last))", d.shape
    )


@block("images", weight=0.8)
def attention_of_pixels(d: Draw) -> Block:
    """Pixels attend to one another by products of 1x1 convolutions (SAGAN)."""
    c, inner = d.shape[0], d.pick(1, 2, 3)
    setup = f"""
        self.q, self.k = nn.Conv2d({c}, {inner}, 1), nn.Conv2d({c}, {inner}, 1)
        self.v = nn.Conv2d({c}, {c}, 1)
        self.gain = nn.Parameter(torch.tensor(0.3))"""
    forward = """
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        y = torch.bmm(v, torch.bmm(q.transpose(1, 2), k).softmax(-1).transpose(1, 2))
        return x + self.gain * y.view_as(x)"""
    return Block(setup, forward, d.shape)
