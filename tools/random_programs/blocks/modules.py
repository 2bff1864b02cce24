"""Blocks that use what `nn.Module` and autograd offer beside layers: hooks, parametrizations, calls with other parameters."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("rows tokens", weight=0.8)
def hooks_of_modules(d: Draw) -> Block:
    """Hooks before and after forward, and on gradients of modules and parameters."""
    register = d.pick(
        "self.fc.register_forward_hook(lambda module, args, out: out * 0.5)",
        "self.fc.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))",
        "self.fc.register_full_backward_hook(lambda module, into, out: tuple(g if g is None else g * 0.5 for g in into))",
        "self.fc.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))",
        "self.fc.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))",
    )
    setup = f"""
        self.fc = nn.Linear({d.last}, {d.last})
        {register}"""
    return Block(setup, f"return x + {d.act('self.fc(x * 1.0)')}", d.shape)


@block("rows tokens", weight=0.8)
def parametrized(d: Draw) -> Block:
    """Weights made of others: by spectral norms with their own iteration, symmetric, positive, of another module."""
    kind = d.pick("spectral", "symmetric", "positive", "called", "sparse")
    setup = f"self.fc = nn.Linear({d.last}, {d.last})"
    forward = "return x + self.fc(x)"
    if kind == "spectral":
        setup += "\n        torch.nn.utils.parametrizations.spectral_norm(self.fc)"
    elif kind == "called":
        forward = """
        own = {name: p * 0.5 for name, p in self.fc.named_parameters()}
        return x + torch.func.functional_call(self.fc, own, (x,))"""
    else:
        made = {"symmetric": "w.triu() + w.triu(1).mT", "positive": "F.softplus(w)"}
        text = made.get(kind, "w * (w.abs() > 0.1)")
        setup += f"""
        class Made(nn.Module):
            def forward(self, w):
                return {text}
        nn.utils.parametrize.register_parametrization(self.fc, "weight", Made())"""
    return Block(setup, forward, d.shape)


@block("rows tokens", weight=0.7)
def functions(d: Draw) -> Block:
    """Functions with backwards of their own: several tensors, numbers, none, in-place, straight through."""
    body = d.pick(
        (
            "ctx.save_for_backward(x, w)\n                return x * w, w.sum()",
            "x, w = ctx.saved_tensors\n                return a * w, (a * x).flatten(0, -2).sum(0) + b",
            "y, s = Own.apply(x, self.weight)\n        return y + 0.1 * s",
        ),
        (
            "ctx.k = 0.3\n                return x.round() * w",
            "return a * ctx.k, None",
            "return Own.apply(x, self.weight) + x * self.weight",
        ),
        (
            "y = (x * w).sigmoid()\n                ctx.save_for_backward(y, w)\n                return y",
            "y, w = ctx.saved_tensors\n                g = a * y * (1 - y)\n                return g * w, g.flatten(0, -2).mean(0)",
            "return Own.apply(x, self.weight)",
        ),
    )
    gradients = "a, b" if "s = Own" in body[2] else "a"
    forward = f"""
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                {body[0]}

            @staticmethod
            def backward(ctx, {gradients}):
                {body[1]}

        {body[2]}"""
    return Block(f"self.weight = nn.Parameter(torch.rand({d.last}) + 0.5)", forward, d.shape)


@block("rows tokens", weight=0.7)
def transforms(d: Draw) -> Block:
    """Derivatives and maps of torch.func inside of forward."""
    setup = f"self.fc = nn.Linear({d.last}, {d.last})"
    flat = "x.reshape(-1, x.shape[-1])"
    made = d.pick(
        f"torch.func.vmap(torch.func.grad(lambda r: torch.tanh(self.fc(r)).square().sum()))({flat})",
        f"torch.func.vmap(lambda r: self.fc(r) * r.sum())({flat})",
        "torch.func.jvp(lambda v: torch.tanh(self.fc(v)), (x,), (torch.ones_like(x),))[1]",
        f"torch.func.vmap(torch.func.jacrev(lambda r: torch.tanh(self.fc(r))))({flat}).sum(-1)",
        "torch.func.vjp(self.fc, x)[1](torch.ones_like(x))[0]",
    )
    return Block(setup, f"return x + {made}.reshape(x.shape)", d.shape)


@block("rows tokens", weight=0.8)
def nested_checkpoints(d: Draw) -> Block:
    """Checkpoints inside of one another, of several layers, or of a loop."""
    setup = f"""
        self.layers = nn.ModuleList(nn.Linear({d.last}, {d.last}) for _ in range(3))
        self.drop = nn.Dropout({d.dropout})"""
    act = d.act("self.layers[0](x)")
    forward = d.pick(
        f"""
        inner = lambda x: checkpoint(lambda x: self.drop({act}), x, use_reentrant=False) + self.layers[1](x)
        return checkpoint(inner, x, use_reentrant=False)""",
        """
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False).tanh()
        return x""",
        """
        return torch.utils.checkpoint.checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)""",
    )
    return Block(setup, forward, d.shape)


@block("rows tokens images", weight=0.8)
def norms_of_torch(d: Draw) -> Block:
    """Norms with other options: frozen statistics, of instances."""
    channels = d.shape[0] if len(d.shape) == 3 else d.last
    dims = "2d" if len(d.shape) == 3 else "1d"
    made = d.pick(
        f"nn.BatchNorm{dims}({channels}, momentum=0.9)",
        f"nn.BatchNorm{dims}({channels}, eps=0.1, affine=False)",
        f"nn.BatchNorm{dims}({channels})",
    )
    turn = ".transpose(1, 2)" if len(d.shape) == 2 else ""
    if len(d.shape) > 1 and d.flag(0.4) and (d.shape[0] > 1 or len(d.shape) == 3):
        made = f"nn.InstanceNorm{dims}({channels}, affine={d.flag()}, track_running_stats={d.flag()}, eps=0.1)"
    forward = f"return self.norm(x{turn}){turn}"
    if d.flag(0.3):
        forward = f"self.norm.eval()\n        {forward}"
    return Block(f"self.norm = {made}", forward, d.shape)


@block("tokens", weight=0.8)
def recurrent_states(d: Draw) -> Block:
    """Recurrent layers with states that come in and go out, time first or last."""
    kind, width = d.pick("LSTM", "GRU", "RNN"), d.pick(2, 3, 4)
    setup = f"""
        self.rnn = nn.{kind}({d.last}, {width}, batch_first=True)
        self.first = nn.Parameter(torch.randn(1, 1, {width}))"""
    state = "self.first.expand(1, x.shape[0], -1).contiguous()"
    state = f"({state}, torch.zeros_like({state}))" if kind == "LSTM" else state
    last = "h[0]" if kind == "LSTM" else "h"
    forward = d.pick(
        f"out, h = self.rnn(x, {state})\n        return out + {last}.transpose(0, 1)",
        f"out, h = self.rnn(x, {state})\n        return out.flip(1)",
        "out, h = self.rnn(x)\n        return self.rnn(x.flip(1), h)[0] + out",
    )
    return Block(setup, forward, d.with_last(width))


@block("tokens", weight=0.8)
def masked_attention(d: Draw) -> Block:
    """`nn.MultiheadAttention` with masks of data, its weights read; whole encoders."""
    heads = d.divisor(d.last)
    setup = f"self.attention = nn.MultiheadAttention({d.last}, {heads}, batch_first=True)"
    pad = "torch.cat([torch.zeros_like(x[:, :1, 0]).bool(), x[:, 1:, 0].detach() > 1.0], 1)"
    forward = d.pick(
        f"return x + self.attention(x, x, x, key_padding_mask={pad})[0]",
        f"y, w = self.attention(x, x, x, key_padding_mask={pad}, average_attn_weights=False)\n        return x + y + w.mean((1, 2))[..., None]",
        "y, w = self.attention(x, x, x)\n        return x + w @ y",
        "mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)\n        return x + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]",
    )
    return Block(setup, forward, d.shape)


@block("tokens", weight=0.7)
def volumes(d: Draw) -> Block:
    """Convolutions and poolings of other dimensions."""
    t, width = d.shape
    options = [
        (
            "self.conv = nn.Conv3d(1, 2, 3, padding=1)",
            "return self.conv(x[:, None, None]).mean(1)[:, 0]",
            d.shape,
        ),
        (
            f"self.conv = nn.ConvTranspose1d({width}, 3, 2, stride=2)",
            "return self.conv(x.mT).mT",
            (2 * t, 3),
        ),
        ("", "return F.avg_pool1d(x, 2, 1, 1)[..., :x.shape[-1]]", d.shape),
        (f"self.conv = nn.Conv1d({t}, {t}, 1, groups={t})", "return self.conv(x)", d.shape),
        (
            "self.conv = nn.Conv2d(1, 2, 3, padding='same', padding_mode='replicate')",
            "return self.conv(x[:, None]).amax(1)",
            d.shape,
        ),
        ("", "return F.interpolate(x, size=5, mode='linear', align_corners=True)", (t, 5)),
        ("", "return F.adaptive_avg_pool1d(x, 3)", (t, 3)),
    ]
    if t > 1:
        options.append(
            (
                "",
                "v, i = F.max_pool1d(x.mT, 2, return_indices=True)\n        return F.max_unpool1d(v, i, 2, output_size=[x.shape[1]]).mT + x",
                d.shape,
            )
        )
    return Block(*d.pick(*options))
