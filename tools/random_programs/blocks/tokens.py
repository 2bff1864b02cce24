"""Blocks on tokens [n, t, d]: attention in its forms, recurrences, convolutions over time, pooling."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("tokens", weight=5)
def attention(d: Draw) -> Block:
    """Self-attention by heads: fused or written out, causal or not, grouped keys, rotary, biased."""
    kv = d.pick(1, 2, 2, 3)
    heads, width = kv * d.pick(1, 1, 2, 3), d.pick(2, 4, 4, 3, 6)
    bias, fused = d.flag(), d.flag(0.4) and kv == heads
    setup = [f"self.out = nn.Linear({heads * width}, {d.last}, bias={d.flag()})"]
    if fused:
        setup.append(f"self.qkv = nn.Linear({d.last}, {3 * heads * width}, bias={bias})")
        split = "q, k, v = self.qkv(x).chunk(3, -1)"
        if d.flag():
            split = f"q, k, v = self.qkv(x).view(*x.shape[:2], {heads}, {3 * width}).chunk(3, -1)"
    else:
        setup.append(f"self.q = nn.Linear({d.last}, {heads * width}, bias={bias})")
        setup += [f"self.{one} = nn.Linear({d.last}, {kv * width}, bias={bias})" for one in "kv"]
        split = "q, k, v = self.q(x), self.k(x), self.v(x)"
    lines = [split]
    for name, count in (("q", heads), ("k", kv), ("v", kv)):
        lines.append(f"{name} = {name}.reshape(*x.shape[:2], {count}, {width}).transpose(1, 2)")
    if width % 2 == 0 and d.flag(0.4):
        lines += _rotary(d, width)
    lines += _weighted(d, heads, kv, width, setup)
    lines.append(f"y = y.transpose(1, 2).reshape(*x.shape[:2], {heads * width})")
    lines.append(d.pick("return x + self.out(y)", "return self.out(y)"))
    return Block("\n        ".join(setup), "\n        ".join(lines), d.shape)


def _rotary(d: Draw, width: int) -> list[str]:
    lines = [
        f"angles = torch.arange(x.shape[1])[:, None] * torch.tensor([0.5 ** i for i in range({width // 2})])",
        "cos, sin = torch.cat([angles, angles], -1).cos().to(x.dtype), torch.cat([angles, angles], -1).sin().to(x.dtype)",
    ]
    for name in "qk":
        half = f"torch.cat([-{name}[..., {width // 2}:], {name}[..., :{width // 2}]], -1)"
        lines.append(f"{name} = {name} * cos + {half} * sin")
    return lines


def _weighted(d: Draw, heads: int, kv: int, width: int, setup: list[str]) -> list[str]:
    """Lines that make y [n, heads, t, width] of q, k and v."""
    t = d.shape[0]
    groups = heads // kv
    repeat = [f"k, v = k.repeat_interleave({groups}, 1), v.repeat_interleave({groups}, 1)"]
    if d.flag():
        repeat = [
            f"k, v = (z[:, :, None].expand(-1, -1, {groups}, -1, -1).reshape(-1, {heads}, x.shape[1], {width}) for z in (k, v))"
        ]
    repeat = repeat if groups > 1 else []
    mask = d.pick("none", "causal", "causal", "window", "learned", "boolean")
    masks = {
        "none": [],
        "causal": [
            "mask = torch.full((x.shape[1], x.shape[1]), float('-inf'), dtype=x.dtype).triu(1)"
        ],
        "window": [
            "i = torch.arange(x.shape[1])",
            "mask = torch.where((i[:, None] - i).abs() < 2, 0.0, -1e4).to(x.dtype)",
        ],
        "learned": ["mask = self.bias"],
        "boolean": [
            f"mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril({d.pick(0, 1)})"
        ],
    }
    if mask == "learned":
        setup.append(f"self.bias = nn.Parameter(torch.randn({heads}, {t}, {t}))")
    form = d.pick("fused", "fused", "written", "written", "bmm", "einsum")
    if form == "fused":
        gqa = groups > 1 and d.flag()
        head = [] if gqa else repeat
        given = {"none": "", "causal": ", is_causal=True"}.get(mask, ", attn_mask=mask")
        more = ", enable_gqa=True" if gqa else ""
        more += f", scale={d.pick(0.3, 0.5)}" if d.flag(0.2) else ""
        more += f", dropout_p={d.dropout}" if d.dropout else ""
        call = f"y = F.scaled_dot_product_attention(q, k, v{given}{more})"
        return [*head, *([] if mask == "causal" else masks[mask]), call]
    added = {"none": [], "boolean": ["scores = scores.masked_fill(~mask, float('-inf'))"]}
    add = added.get(mask, ["scores = scores + mask"])
    tail = [*add, "p = scores.softmax(-1)"]
    if d.dropout:
        tail.append(f"p = F.dropout(p, {d.dropout}, self.training)")
    if form == "written":
        first, last = f"scores = q @ k.transpose(-1, -2) / {width} ** 0.5", "y = p @ v"
    elif form == "einsum":
        first = f"scores = torch.einsum('nhqd,nhkd->nhqk', q, k) / {width} ** 0.5"
        last = "y = torch.einsum('nhqk,nhkd->nhqd', p, v)"
    else:
        return [*repeat, *masks[mask], *_batched(d, mask, heads, width)]
    return [*repeat, *masks[mask], first, *tail, last]


def _batched(d: Draw, mask: str, heads: int, width: int) -> list[str]:
    """Attention with batched products, on [n · heads, t, width]."""
    lines = [f"q, k, v = (z.reshape(-1, x.shape[1], {width}) for z in (q, k, v))"]
    if d.flag():
        lines.append("scores = torch.bmm(q, k.transpose(1, 2)) * 0.4")
    else:
        lines += [
            f"bias = torch.arange({heads})[:, None, None] * torch.arange(x.shape[1]) * -0.1",
            "bias = bias.to(x.dtype).repeat(x.shape[0], 1, 1)",
            "scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.7, alpha=0.4)",
        ]
    there = f"scores.view(-1, {heads}, x.shape[1], x.shape[1])"
    if mask == "boolean":
        lines.append(f"scores = {there}.masked_fill(~mask, -1e4)")
    elif mask != "none":
        lines.append(f"scores = {there} + mask")
    if d.flag():
        lines.append(f"p = scores.view(-1, {heads}, x.shape[1], x.shape[1]).softmax(-1)")
    else:
        lines.append("p = scores.softmax(-1)")
    if d.dropout:
        lines.append(f"p = F.dropout(p, {d.dropout}, self.training)")
    lines.append("y = torch.bmm(p.view(-1, x.shape[1], x.shape[1]), v)")
    return [*lines, f"y = y.view(-1, {heads}, x.shape[1], {width})"]


@block("tokens", weight=1)
def torch_attention(d: Draw) -> Block:
    heads = d.divisor(d.last)
    more = d.pick("", ", bias=False", ", add_zero_attn=True", f", kdim={d.last}")
    setup = f"self.attention = nn.MultiheadAttention({d.last}, {heads}, batch_first=True, dropout={d.dropout}{more})"
    call = d.pick("x, x, x", "x, x.flip(1), x", "x, x, x, need_weights=False")
    return Block(setup, f"return x + self.attention({call})[0]", d.shape)


@block("tokens", weight=1)
def torch_layer(d: Draw) -> Block:
    heads, width = d.divisor(d.last), d.size()
    more = f"dropout={d.dropout}, activation={d.pick('gelu', 'relu')!r}, norm_first={d.flag()}"
    setup = f"self.layer = nn.TransformerEncoderLayer({d.last}, {heads}, {width}, batch_first=True, {more})"
    mask = "nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)"
    call = d.pick("x", "x", f"x, src_mask={mask}, is_causal=True")
    return Block(setup, f"return self.layer({call})", d.shape)


@block("tokens", weight=1.5)
def recurrent(d: Draw) -> Block:
    kind, width, two = d.pick("LSTM", "LSTM", "GRU", "RNN"), d.pick(2, 3, 4, 5), d.flag(0.3)
    layers = d.pick(1, 1, 2)
    more = f"num_layers={layers}, bidirectional={two}, bias={d.flag(0.8)}, dropout={d.dropout if layers > 1 else 0.0}"
    if kind == "LSTM" and width > 2 and d.flag(0.15):
        more += ", proj_size=2"
    size = (2 if "proj_size" in more else width) * (2 if two else 1)
    setup = f"self.rnn = nn.{kind}({d.last}, {width}, batch_first=True, {more})"
    return Block(setup, "return self.rnn(x)[0]", d.with_last(size))


@block("tokens")
def cell(d: Draw) -> Block:
    kind, width = d.pick("LSTMCell", "GRUCell", "RNNCell"), d.pick(2, 3, 4)
    first = "state if isinstance(state, torch.Tensor) else state[0]"
    forward = f"""
        state, made = None, []
        for one in x.unbind(1):
            state = self.cell(one, state)
            made.append({first})
        return torch.stack(made, 1)"""
    return Block(f"self.cell = nn.{kind}({d.last}, {width})", forward, d.with_last(width))


@block("tokens", weight=1.5)
def convolution_in_time(d: Draw) -> Block:
    kernel, width = d.pick(1, 2, 3), d.size()
    if d.flag():  # causal
        forward = f"return self.conv(F.pad(x.transpose(1, 2), ({kernel - 1}, 0))).transpose(1, 2)"
        setup = f"self.conv = nn.Conv1d({d.last}, {width}, {kernel})"
        return Block(setup, forward, d.with_last(width))
    setup = f"self.conv = nn.Conv1d({d.last}, {d.last}, 3, padding=1, groups={d.pick(1, d.last)})"
    return Block(setup, "return x + self.conv(x.transpose(1, 2)).transpose(1, 2)", d.shape)


@block("tokens", weight=1.5)
def positions(d: Draw) -> Block:
    t, width = d.shape
    setup, forward = d.pick(
        (
            f"self.position = nn.Parameter(torch.randn({t + 2}, {width}))",
            "return x + self.position[: x.shape[1]]",
        ),
        (
            f"self.position = nn.Embedding({t}, {width})",
            "return x + self.position(torch.arange(x.shape[1]))",
        ),
        (
            f"self.position = nn.Embedding({t}, {width})",
            "return x + self.position(torch.arange(x.shape[1]).expand(x.shape[0], -1))",
        ),
        (
            f'self.register_buffer("position", torch.randn(1, {t}, {width}))',
            "return x + self.position[:, : x.shape[1]]",
        ),
    )
    return Block(setup, forward, d.shape)


@block("tokens")
def order_of_time(d: Draw) -> Block:
    expression = d.pick(
        "x + x.cumsum(1) / x.shape[1]",
        "x + F.pad(x, (0, 0, 1, 0))[:, :-1]",
        "torch.cat([x[:, -1:], x[:, :-1]], 1)",
        "x + x.flip(1)",
        "x * x.softmax(1)",
        "x - x.mean(1, keepdim=True)",
        "x.gather(1, x[..., :1].argsort(1).expand_as(x))",
        "x.take_along_dim(x.argsort(1), 1)",
        "x + x.roll(2, 1)",
        "x + x.amax((0, 1))",
    )
    return Block("", f"return {expression}", d.shape)


@block("tokens", weight=0.8)
def length_changed(d: Draw) -> Block:
    t, width = d.shape
    setup, forward, shape = d.pick(
        (
            f"self.token = nn.Parameter(torch.randn(1, 1, {width}))",
            "return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)",
            (t + 1, width),
        ),
        ("", "return x[:, ::2]", ((t + 1) // 2, width)),
        ("", "return x.repeat_interleave(2, 1)", (2 * t, width)),
        ("", "return x.flatten(1).unflatten(1, (x.shape[2], x.shape[1]))", (width, t)),
        ("", "return x.transpose(1, 2)", (width, t)),
        (
            "",
            "return F.interpolate(x.transpose(1, 2), scale_factor=2, mode='linear').transpose(1, 2)",
            (2 * t, width),
        ),
        ("", "return torch.cat([x, x.mean(1, keepdim=True)], 1)", (t + 1, width)),
    )
    return Block(setup, forward, shape)


@block("tokens", weight=2)
def pooled(d: Draw) -> Block:
    t, width = d.shape
    setup, forward, size = d.pick(
        ("", "return x.mean(1)", width),
        ("", "return x[:, -1]", width),
        ("", "return x[:, 0]", width),
        ("", "return x.amax(1)", width),
        ("", "return x.flatten(1)", t * width),
        ("", "return torch.cat([x.mean(1), x.max(1).values], -1)", 2 * width),
        (
            f"self.score = nn.Linear({width}, 1)",
            "return (self.score(x).softmax(1) * x).sum(1)",
            width,
        ),
        ("", "return torch.einsum('nti,ntj->nij', x, x).flatten(1) / x.shape[1]", width * width),
        ("", "return x[torch.arange(x.shape[0]), x[..., 0].argmax(1)]", width),
    )
    return Block(setup, forward, (size,))


@block("tokens", weight=0.7)
def mixed_in_time(d: Draw) -> Block:
    """A linear layer over time (MLP-Mixer)."""
    t, hidden = d.shape[0], d.size()
    setup = f"""
        self.up = nn.Linear({t}, {hidden})
        self.down = nn.Linear({hidden}, {t})"""
    return Block(
        setup,
        f"return x + self.down({d.act('self.up(x.transpose(1, 2))')}).transpose(1, 2)",
        d.shape,
    )


@block("tokens", weight=0.7)
def linear_attention(d: Draw) -> Block:
    setup = f"self.qkv = nn.Linear({d.last}, {3 * d.last}, bias=False)"
    forward = d.pick(
        """
        q, k, v = self.qkv(x).split(x.shape[-1], -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return x + torch.einsum('ntd,nsd,nse->nte', q, k, v) / x.shape[1]""",
        """
        q, k, v = self.qkv(x).split(x.shape[-1], -1)
        states = torch.einsum('ntd,nte->ntde', k, v).cumsum(1)
        return x + torch.einsum('ntd,ntde->nte', q, states) / x.shape[1]""",
    )
    return Block(setup, forward, d.shape)


@block("rows", weight=0.8)
def cut_into_tokens(d: Draw) -> Block:
    t = d.divisor(d.last)
    forward = d.pick(
        f"return x.view(x.shape[0], {t}, {d.last // t})",
        f"return x.unflatten(1, ({d.last // t}, {t})).transpose(1, 2)",
    )
    return Block("", forward, (t, d.last // t))
