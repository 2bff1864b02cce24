"""What networks do beside layers: buffers that are written, in-place ops, sorts, odd dtypes, statistics of the batch."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block(weight=0.8)
def moving_average(d: Draw) -> Block:
    """A buffer that every step writes, in place or anew."""
    mean = "x.detach().mean(0)"
    write = d.pick(
        f"self.mean.mul_(0.9).add_({mean}, alpha=0.1)",
        f"self.mean = self.mean * 0.9 + {mean} * 0.1",
        f"self.mean.lerp_({mean}, 0.1)",
        f"self.mean.copy_({mean})",
    )
    uses = d.pick("x - self.mean", "x", "x / (1 + self.mean.abs())", "x - self.mean.detach()")
    return Block(
        f'self.register_buffer("mean", torch.zeros({d.shape}))',
        f"{write}\n        return {uses}"
        if d.flag(0.7)
        else f"y = {uses}\n        {write}\n        return y",
        d.shape,
    )


@block(weight=0.5)
def counter(d: Draw) -> Block:
    setup = 'self.register_buffer("steps", torch.tensor(0))'
    forward = f"""
        {d.pick("self.steps += 1", "self.steps = self.steps + 1", "self.steps.add_(x.shape[0])")}
        return x * (1 + 1 / (1 + self.steps))"""
    return Block(setup, forward, d.shape)


@block(weight=0.7)
def written_in_place(d: Draw) -> Block:
    part = d.rng.randint(1, d.last)
    line = d.pick(
        f"y[..., :{part}] *= 2.0",
        f"y[..., {part - 1}] = 0.5",
        f"y[..., :{part}] += x[..., -{part}:]",
        "y.masked_fill_(y > 1.0, 0.3)",
        "y.clamp_(-1.0, 1.0).mul_(x)",
        "y[1:] += x[:-1]",
        "y[:, 0] = y[:, 0] * 0.5",
        "y.mul_(0.5).add_(x, alpha=0.5)",
        f"torch.relu_(y[..., {part - 1}:])",
    )
    return Block("", f"y = x * 1.0\n        {line}\n        return y", d.shape)


@block(weight=0.8)
def statistics_of_the_batch(d: Draw) -> Block:
    expression = d.pick(
        "x - x.mean(0)",
        "x / (1 + x.std(0, unbiased=False))",
        "x - x.amax(0, keepdim=True)",
        "x * x.softmax(0)",
        "x - x.logsumexp(0)",
        "x / (1 + x.abs().sum())",
        "x + x.var()",
        "(x - x.mean()) / (x.norm() + 1)",
        "x * (x > x.mean(0))",
        "x - x.min(0).values",
        "x - x.median(0).values",
    )
    return Block("", f"return {expression}", d.shape)


@block(weight=0.8)
def order_of_the_batch(d: Draw) -> Block:
    expression = d.pick(
        "x + x.flip(0)",
        "x + x.roll(1, 0)",
        "x + x.cumsum(0) / x.shape[0]",
        "x + x.sort(0).values",
        "torch.cat([x[1:], x[:1]])",
        "torch.cat([x[::2], x[1::2]])",
        "x + torch.cat([torch.zeros_like(x[:1]), x[:-1]])",
        "x + x[torch.arange(x.shape[0] - 1, -1, -1)]",
        "x + F.pad(x[1:].transpose(0, -1), (0, 1)).transpose(0, -1)",
    )
    return Block("", f"return {expression}", d.shape)


@block("rows")
def pairs_of_the_batch(d: Draw) -> Block:
    forward = d.pick(
        "return x + (x @ x.t() / 4).softmax(-1) @ x",
        "return x + (x @ x.t()).tril() @ x / (x.shape[0] * 4)",
        "return x + torch.exp(-torch.cdist(x, x + 0.1)) @ x / x.shape[0]",
        "return x + torch.exp(-(x[:, None] - x[None]).square().sum(-1)) @ x / x.shape[0]",
        "return x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
    )
    return Block("", forward, d.shape)


@block(weight=0.8)
def order_of_features(d: Draw) -> Block:
    last = d.last
    expression = d.pick(
        "x + x.sort(-1).values",
        "x + x.sort(-1, descending=True).values",
        "x + x.cumsum(-1) / 4",
        "x + x.flip(-1)",
        f"x + x.roll({d.rng.randint(-3, 3)}, -1)",
        "x.gather(-1, x.argsort(-1))",
        "x + x.cummax(-1).values",
        "x + x.logcumsumexp(-1)",
        f"x * (x >= x.topk({d.rng.randint(1, last)}, -1).values[..., -1:])",
        f"torch.zeros_like(x).scatter(-1, x.topk({d.rng.randint(1, last)}, -1).indices, 1.0) * x",
        "x * F.one_hot(x.argmax(-1), x.shape[-1]) + x",
        f"x[..., torch.tensor({d.rng.choices(range(last), k=last)})]",
        f"x.index_select(-1, torch.tensor({d.rng.choices(range(last), k=last)}))",
    )
    return Block("", f"return {expression}", d.shape)


@block("rows tokens", weight=0.7)
def kept_features(d: Draw) -> Block:
    """Fewer features, by value, position or stride."""
    k = d.rng.randint(1, d.last)
    expression, size = d.pick(
        (f"x.topk({k}, -1).values", k),
        (f"x[..., :{k}]", k),
        ("x[..., ::2]", (d.last + 1) // 2),
        (f"x.narrow(-1, {d.last - k}, {k})", k),
        ("torch.cat([x, x.mean(-1, keepdim=True)], -1)", d.last + 1),
        ("torch.cat([x, -x], -1)", 2 * d.last),
        ("torch.stack([x, x.square()], -1).flatten(-2)", 2 * d.last),
        ("F.pad(x, (1, 2))", d.last + 3),
        ("x.repeat_interleave(2, -1)", 2 * d.last),
        (f"x.unfold(-1, {k}, 1).amax(-1)", d.last - k + 1),
        ("F.glu(torch.cat([x, x], -1), -1)", d.last),
    )
    return Block("", f"return {expression}", d.with_last(size))


@block(weight=0.6)
def odd_dtypes(d: Draw) -> Block:
    expression = d.pick(
        "x + x.float().sin().to(x.dtype)",
        "x + torch.fft.fft(x, norm='ortho').real",
        "x + torch.fft.irfft(torch.fft.rfft(x, norm='ortho'), x.shape[-1], norm='ortho')",
        "torch.view_as_real(torch.complex(x, x.cos()) * torch.complex(x.sin(), x))[..., 0]",
        "x + torch.polar(x.sigmoid(), x).abs()",
        "x + (x > 0).long().cumsum(-1).to(x.dtype) / 8",
        "x + (x.detach() * 4).to(torch.int32).remainder(3).to(x.dtype)",
        "x + ((x > 0) & (x < 1) | ~(x > -1)).to(x.dtype)",
        "x + (x.round() - x).detach()",
        "x + (x > 0).any(-1, keepdim=True) - (x > -2).all(-1, keepdim=True).float()",
        "x * torch.sign(x.detach()) + torch.floor(x) * 0.1",
        "torch.nan_to_num(x / x.relu(), 0.5, 0.5, -0.5).detach() + x",
    )
    return Block("", f"return {expression}", d.shape)


@block("rows tokens", weight=0.6)
def complex_parameter(d: Draw) -> Block:
    setup = f"self.weight = nn.Parameter(torch.randn({d.last}, dtype=torch.complex128) / 2)"
    return Block(
        setup,
        "return (torch.fft.fft(x.double(), norm='ortho') * self.weight).real.to(x.dtype)",
        d.shape,
    )


@block("rows tokens", weight=0.7)
def codebook(d: Draw) -> Block:
    """Vectors in place of which the nearest of a table stand, straight through."""
    size = d.size()
    setup = f"self.codes = nn.Parameter(torch.randn({size}, {d.last}))"
    near = d.pick(
        "(x.unsqueeze(-2) - self.codes).square().sum(-1).argmin(-1)",
        "torch.cdist(x, self.codes).argmin(-1)",
        "(x @ self.codes.t()).argmax(-1)",
    )
    forward = f"""
        near = {near}
        chosen = {d.pick("F.embedding(near, self.codes)", "self.codes[near]")}
        loss = F.mse_loss(x, chosen)
        return x + (chosen - x).detach(), loss"""
    return Block(setup, forward, d.shape, auxiliary=True)


@block("rows tokens", weight=0.6)
def buckets(d: Draw) -> Block:
    """Numbers as bins of an embedding."""
    size = d.size()
    setup = f"self.table = nn.Embedding({size}, {d.last})"
    bins = f"(x[..., 0].detach().sigmoid() * {size}).long().clamp(0, {size - 1})"
    if d.flag(0.3):
        bins = f"torch.bucketize(x[..., 0].detach(), torch.linspace(-1, 1, {max(size - 1, 1)})).clamp(max={size - 1})"
    return Block(setup, f"return x + self.table({bins})", d.shape)


@block(weight=0.6)
def choices(d: Draw) -> Block:
    setup = f'self.register_buffer("other", torch.randn({d.last}))'
    expression = d.pick(
        "torch.where(x > self.other, x, self.other)",
        "torch.where(x > 0, x, 0.1)",
        "torch.maximum(x, self.other)",
        "torch.minimum(x, -x)",
        "x.masked_fill(self.other > 0, 0.5)",
        "torch.lerp(x, self.other, 0.3)",
        "torch.addcmul(x, self.other, self.other, value=0.2)",
        "x.clamp(min=self.other)",
        "torch.hypot(x, self.other)",
        "torch.atan2(x, 1 + self.other.abs())",
    )
    return Block(setup, f"return {expression}", d.shape)


@block("rows tokens", weight=0.6)
def scan(d: Draw) -> Block:
    """A loop over features or positions, one state."""
    dim = d.pick(-1, 1)
    setup = "self.decay = nn.Parameter(torch.tensor(0.7))"
    forward = f"""
        state, made = torch.zeros_like(x.select({dim}, 0)), []
        for part in x.unbind({dim}):
            state = {d.pick("torch.tanh(state * self.decay + part)", "state * self.decay.sigmoid() + part")}
            made.append(state)
        return torch.stack(made, {dim})"""
    return Block(setup, forward, d.shape)


@block(weight=0.5)
def own_gradient(d: Draw) -> Block:
    """A function with a backward of its own."""
    setup = ""
    forward = """
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx, gradient):
                (x,) = ctx.saved_tensors
                return gradient * x.cos() * 0.5

        return Scaled.apply(x)"""
    return Block(setup, forward, d.shape)


@block(weight=0.5)
def regularized(d: Draw) -> Block:
    loss = d.pick(
        "x.square().mean()",
        "x.abs().sum() * 0.01",
        "self.weight.square().sum()",
        "(x.mean(0).square().sum() - x.var(0, unbiased=False).mean())",
        "x.detach().mean() * self.weight.sum()",
    )
    setup = f"self.weight = nn.Parameter(torch.rand({d.last}) + 0.5)"
    return Block(setup, f"return x * self.weight, {loss}", d.shape, auxiliary=True)


@block("rows tokens", weight=0.5)
def outside(d: Draw) -> Block:
    """Rows written or added at places that a buffer says."""
    size = d.size()
    places = d.rng.choices(range(size), k=d.last)
    setup = f'self.register_buffer("places", torch.tensor({places}))'
    made = f"x.new_zeros(*x.shape[:-1], {size})"
    expression = d.pick(
        f"{made}.index_add(-1, self.places, x)",
        f"{made}.scatter_add(-1, self.places.expand_as(x), x)",
        f"{made}.index_put((*[torch.arange(s).view([-1] + [1] * (x.dim() - 1 - i)) for i, s in enumerate(x.shape[:-1])], self.places), x, accumulate=True)",
    )
    return Block(setup, f"return {expression}", d.with_last(size))


@block(weight=0.4)
def scaled_by_norm(d: Draw) -> Block:
    expression = d.pick(
        "F.normalize(x, dim=-1)",
        "x / (x.norm(dim=-1, keepdim=True) + 0.1)",
        "F.local_response_norm(x.unsqueeze(1), 2).squeeze(1) if x.dim() == 2 else F.local_response_norm(x, 2)",
        "x / (x.abs().amax(-1, keepdim=True) + 0.1)",
        "x / (1 + F.cosine_similarity(x, x.roll(1, -1), -1).unsqueeze(-1).square())",
        "x.log_softmax(-1)",
        "x * x.prod(-1, keepdim=True).tanh()",
    )
    return Block("", f"return {expression}", d.shape)
