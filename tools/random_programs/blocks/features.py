"""Layers on the last dimension, norms, residuals: the usual parts of networks."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("rows tokens", weight=3)
def linear(d: Draw) -> Block:
    width = d.size()
    return Block(
        f"self.fc = nn.Linear({d.last}, {width}, bias={d.flag(0.7)})",
        f"return {d.act('self.fc(x)')}",
        d.with_last(width),
    )


@block("rows tokens", weight=3)
def mlp(d: Draw) -> Block:
    width = d.size() * d.pick(1, 2, 4)
    setup = f"""
        self.up = nn.Linear({d.last}, {width}, bias={d.flag()})
        self.down = nn.Linear({width}, {d.last}, bias={d.flag()})
        self.drop = nn.Dropout({d.dropout})"""
    return Block(setup, f"return x + self.drop(self.down({d.act('self.up(x)')}))", d.shape)


@block("rows tokens", weight=2)
def swiglu(d: Draw) -> Block:
    width = d.size()
    if d.flag():
        setup = f"""
        self.up = nn.Linear({d.last}, {2 * width}, bias=False)
        self.down = nn.Linear({width}, {d.last})"""
        forward = """
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)"""
    else:
        setup = f"""
        self.gate = nn.Linear({d.last}, {width}, bias=False)
        self.up = nn.Linear({d.last}, {width}, bias=False)
        self.down = nn.Linear({width}, {d.last}, bias=False)"""
        forward = "return x + self.down(F.silu(self.gate(x)) * self.up(x))"
    return Block(setup, forward, d.shape)


@block("rows tokens images", weight=2)
def layer_norm(d: Draw) -> Block:
    dims = d.shape if d.flag(0.2) else (d.last,)
    affine = d.pick("", ", bias=False", ", elementwise_affine=False")
    return Block(f"self.norm = nn.LayerNorm({list(dims)}{affine})", "return self.norm(x)", d.shape)


@block("rows tokens images")
def rms_norm(d: Draw) -> Block:
    if d.flag():
        return Block(f"self.norm = nn.RMSNorm({d.last})", "return self.norm(x)", d.shape)
    forward = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight"
    return Block(f"self.weight = nn.Parameter(torch.rand({d.last}) + 0.5)", forward, d.shape)


@block("rows", weight=1.5)
def batch_norm(d: Draw) -> Block:
    more = d.pick("", ", affine=False", ", track_running_stats=False", ", momentum=0.3")
    return Block(f"self.norm = nn.BatchNorm1d({d.last}{more})", "return self.norm(x)", d.shape)


@block("tokens")
def batch_norm_of_tokens(d: Draw) -> Block:
    forward = "return self.norm(x.transpose(1, 2)).transpose(1, 2)"
    return Block(f"self.norm = nn.BatchNorm1d({d.last})", forward, d.shape)


@block("rows tokens")
def group_norm(d: Draw) -> Block:
    groups = d.divisor(d.last)
    forward = "return self.norm(x)" if len(d.shape) == 1 else "return self.norm(x.mT).mT"
    # A group of one element has no variance, and its gradient is noise.
    if d.last // groups * (d.shape[0] if len(d.shape) == 2 else 1) < 2:
        groups = 1
    return Block(f"self.norm = nn.GroupNorm({groups}, {d.last})", forward, d.shape)


@block(weight=0.7)
def dropout(d: Draw) -> Block:
    kind = "Dropout" if len(d.shape) != 3 or d.flag() else "Dropout2d"
    kind = d.pick(kind, "AlphaDropout") if d.dropout else kind
    return Block(f"self.drop = nn.{kind}({d.dropout})", "return self.drop(x)", d.shape)


@block("rows tokens")
def used_twice(d: Draw) -> Block:
    """One parameter in two products."""
    width = d.size()
    forward = f"return {d.act('x @ self.weight')} @ self.weight.t()"
    setup = f"self.weight = nn.Parameter(torch.randn({d.last}, {width}) / {width + d.last} ** 0.5)"
    return Block(setup, forward, d.shape)


@block("rows tokens")
def called_twice(d: Draw) -> Block:
    """One module that runs several times."""
    times = d.pick(2, 3)
    forward = f"""
        for _ in range({times}):
            x = x + {d.act("self.fc(x)")} / {times}
        return x"""
    return Block(f"self.fc = nn.Linear({d.last}, {d.last})", forward, d.shape)


@block("rows tokens")
def checkpointed(d: Draw) -> Block:
    width = d.size()
    setup = f"""
        self.up = nn.Linear({d.last}, {width})
        self.down = nn.Linear({width}, {d.last})
        self.drop = nn.Dropout({d.dropout})"""
    forward = f"""
        def inner(x):
            return self.drop(self.down({d.act("self.up(x)")}))
        return x + checkpoint(inner, x, use_reentrant={d.flag()})"""
    return Block(setup, forward, d.shape)


@block("rows tokens")
def bilinear(d: Draw) -> Block:
    rank, width = d.pick(1, 2, 3), d.size()
    setup = f"""
        self.left = nn.Parameter(torch.randn({d.last}, {rank}) / {d.last} ** 0.5)
        self.right = nn.Parameter(torch.randn({d.last}, {rank}, {width}) / {d.last} ** 0.5)"""
    forward = "return torch.einsum('...i,ir,...j,jrk->...k', x, self.left, x, self.right)"
    if d.flag():
        forward = "return torch.einsum('...r,...rk->...k', x @ self.left, torch.einsum('...j,jrk->...rk', x, self.right))"
    return Block(setup, forward, d.with_last(width))


@block("rows tokens", weight=0.7)
def weight_norm(d: Draw) -> Block:
    width = d.size()
    kind = d.pick("weight_norm", "weight_norm", "orthogonal")
    if kind == "orthogonal":
        width = d.last
    setup = f"self.fc = torch.nn.utils.parametrizations.{kind}(nn.Linear({d.last}, {width}))"
    return Block(setup, "return self.fc(x)", d.with_last(width))


@block("rows tokens", weight=0.7)
def low_rank(d: Draw) -> Block:
    """A frozen layer and a trained low-rank addition (LoRA)."""
    width, rank = d.size(), d.pick(1, 2, 3)
    setup = f"""
        self.fc = nn.Linear({d.last}, {width}).requires_grad_(False)
        self.a = nn.Linear({d.last}, {rank}, bias=False)
        self.b = nn.Linear({rank}, {width}, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad={d.flag()})"""
    forward = "return self.fc(x) + self.scale * self.b(self.a(x))"
    return Block(setup, forward, d.with_last(width))


@block(weight=0.7)
def scalar_parameters(d: Draw) -> Block:
    setup = """
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.tensor(0.1))"""
    return Block(setup, f"return {d.act('x * self.scale + self.shift')}", d.shape)


@block(weight=0.5)
def unused(d: Draw) -> Block:
    setup = f"""
        self.never = nn.Parameter(torch.randn({d.last}))
        self.frozen = nn.Parameter(torch.randn({d.last}), requires_grad=False)"""
    return Block(setup, "return x + self.frozen", d.shape)


@block(weight=0.7)
def rotary_features(d: Draw) -> Block:
    """A table as a buffer, persistent or not, of halves rotated."""
    half = d.last // 2
    setup = f"""
        angles = torch.arange({half or 1}) * 0.3
        self.register_buffer("cos", angles.cos(), persistent={d.flag()})
        self.register_buffer("sin", angles.sin(), persistent={d.flag()})"""
    if not half:
        return Block(setup, "return x * self.cos", d.shape)
    forward = f"""
        a, b, rest = x.split([{half}, {half}, {d.last - 2 * half}], -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin, rest], -1)"""
    return Block(setup, forward, d.shape)


@block("rows tokens", weight=0.7)
def parts(d: Draw) -> Block:
    """Chunks that do not divide evenly, each with a layer of its own."""
    count = d.pick(2, 3, 4)
    setup = f"""
        sizes = [len(part) for part in torch.arange({d.last}).chunk({count})]
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in sizes)"""
    forward = f"""
        chunks = x.chunk({count}, -1)
        made = [layer(chunk) for layer, chunk in zip(self.layers, chunks)]
        return x + torch.cat(made[::{d.pick(1, -1)}], -1)"""
    return Block(setup, forward, d.shape)
