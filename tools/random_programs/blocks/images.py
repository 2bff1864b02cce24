"""Blocks on images [n, c, h, w]: convolutions, pooling, norms, resizing."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("images", weight=5)
def convolution(d: Draw) -> Block:
    c, h, w = d.shape
    kernel = d.pick(1, 2, 3, 3, 5)
    stride, dilation = d.pick(1, 1, 2, 3), d.pick(1, 1, 1, 2)
    padding = d.pick(0, 1, kernel // 2, kernel // 2)
    sizes = [(s + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for s in (h, w)]
    if min(sizes) < 1:
        kernel, stride, dilation, padding, sizes = 3, 1, 1, 1, [h, w]
    groups = d.pick(1, 1, d.divisor(c))
    width = groups * d.pick(1, 2, 3, 4)
    mode = (
        ""
        if padding == 0 or padding >= min(h, w)
        else d.pick("", "", ", padding_mode='reflect'", ", padding_mode='circular'")
    )
    more = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, bias={d.flag(0.7)}{mode}"
    return Block(
        f"self.conv = nn.Conv2d({c}, {width}, {kernel}, {more})",
        f"return {d.act('self.conv(x)')}",
        (width, *sizes),
    )


@block("images", weight=1.5)
def residual_convolution(d: Draw) -> Block:
    c = d.shape[0]
    setup = f"""
        self.one = nn.Conv2d({c}, {c}, 3, padding=1, bias=False)
        self.norm = nn.{d.pick(f"BatchNorm2d({c})", f"GroupNorm(1, {c})", f"InstanceNorm2d({c}, affine=True)" if d.shape[1] * d.shape[2] > 1 else f"GroupNorm(1, {c})")}
        self.two = nn.Conv2d({c}, {c}, 3, padding=1)"""
    return Block(setup, f"return x + self.two({d.act('self.norm(self.one(x))')})", d.shape)


@block("images", weight=1.5)
def batch_norm_of_images(d: Draw) -> Block:
    return Block(
        f"self.norm = nn.BatchNorm2d({d.shape[0]}, momentum={d.pick(0.1, 0.5)})",
        "return self.norm(x)",
        d.shape,
    )


@block("images")
def group_norm_of_images(d: Draw) -> Block:
    groups = d.divisor(d.shape[0]) if d.shape[1] * d.shape[2] > 1 else 1
    return Block(
        f"self.norm = nn.GroupNorm({groups}, {d.shape[0]})", "return self.norm(x)", d.shape
    )


@block("images", weight=2, least=(2, 2))
def pooling(d: Draw) -> Block:
    c, h, w = d.shape
    kernel = d.pick(2, 2, 3) if min(h, w) > 2 else 2
    stride, padding = d.pick(1, 2, kernel), d.pick(0, 0, 1)
    sizes = tuple((s + 2 * padding - kernel) // stride + 1 for s in (h, w))
    kind = d.pick("max", "max", "avg", "avg2", "lp")
    call = {
        "max": f"F.max_pool2d(x, {kernel}, {stride}, {padding})",
        "avg": f"F.avg_pool2d(x, {kernel}, {stride}, {padding})",
        "avg2": f"F.avg_pool2d(x, {kernel}, {stride}, {padding}, count_include_pad=False)",
        "lp": f"F.avg_pool2d(F.pad(x, [{padding}] * 4).abs() + 0.1, {kernel}, {stride})",
    }[kind]
    return Block("", f"return {call}", (c, *sizes))


@block("images")
def adaptive_pooling(d: Draw) -> Block:
    c, h, w = d.shape
    sizes = d.rng.randint(1, h), d.rng.randint(1, w)
    return Block("", f"return F.adaptive_{d.pick('avg', 'max')}_pool2d(x, {sizes})", (c, *sizes))


@block("images")
def resized(d: Draw) -> Block:
    c, h, w = d.shape
    mode = d.pick(
        "'nearest'", "'bilinear'", "'bilinear', align_corners=True", "'bicubic'", "'area'"
    )
    if h * w > 64:
        return Block("", "return x[..., ::2, ::2]", (c, (h + 1) // 2, (w + 1) // 2))
    return Block("", f"return F.interpolate(x, scale_factor=2, mode={mode})", (c, 2 * h, 2 * w))


@block("images")
def transposed_convolution(d: Draw) -> Block:
    c, h, w = d.shape
    width, stride = d.pick(1, 2, 3), d.pick(1, 2)
    if h * w > 64:
        stride = 1
    sizes = tuple((s - 1) * stride + 2 for s in (h, w))
    setup = f"self.conv = nn.ConvTranspose2d({c}, {width}, 2, stride={stride})"
    return Block(setup, "return self.conv(x)", (width, *sizes))


@block("images")
def channel_gate(d: Draw) -> Block:
    """Squeeze and excitation."""
    c, hidden = d.shape[0], d.pick(1, 2, 3)
    setup = f"""
        self.down = nn.Linear({c}, {hidden})
        self.up = nn.Linear({hidden}, {c})"""
    return Block(
        setup,
        "return x * self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid()[:, :, None, None]",
        d.shape,
    )


@block("images")
def shapes_of_images(d: Draw) -> Block:
    c, h, w = d.shape
    options = [
        (f"self.slope = nn.PReLU({d.pick(1, c)})", "return self.slope(x)", d.shape),
        ("", "return torch.cat([x, x.flip(-1)], 1)", (2 * c, h, w)),
        ("", "return x.transpose(2, 3)", (c, w, h)),
        ("", "return F.pad(x, (1, 0, 0, 1))", (c, h + 1, w + 1)),
        ("", "return x.flatten(2).softmax(-1).view_as(x) * x", d.shape),
        ("", "return x + x.mean((2, 3), keepdim=True)", d.shape),
        ("", "return F.channel_shuffle(x, 2)" if c % 2 == 0 else "return x.roll(1, 1)", d.shape),
        ("", "return x.amax(1, keepdim=True) + x", d.shape),
    ]
    if c % 4 == 0:
        options.append(("", "return F.pixel_shuffle(x, 2)", (c // 4, 2 * h, 2 * w)))
    if h % 2 == 0 and w % 2 == 0:
        options.append(("", "return F.pixel_unshuffle(x, 2)", (4 * c, h // 2, w // 2)))
    if min(h, w) > 1:
        options.append(
            (
                "",
                "return F.unfold(x, 2).view(x.shape[0], -1, x.shape[2] - 1, x.shape[3] - 1)",
                (4 * c, h - 1, w - 1),
            )
        )
    return Block(*d.pick(*options))


@block("images", weight=1.5)
def rows_of_images(d: Draw) -> Block:
    c, h, w = d.shape
    forward, size = d.pick(
        ("return x.mean((2, 3))", c),
        ("return x.flatten(1)", c * h * w),
        ("return x.amax((-2, -1))", c),
    )
    return Block("", forward, (size,))


@block("images")
def tokens_of_images(d: Draw) -> Block:
    c, h, w = d.shape
    return Block("", "return x.flatten(2).transpose(1, 2)", (h * w, c))
