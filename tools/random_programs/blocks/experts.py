"""Mixtures of experts, as models write them."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("tokens rows", weight=2.5)
def sorted_experts(d: Draw) -> Block:
    """Rows sorted by experts, torch's grouped products, rows put back."""
    experts, hidden, biased = d.pick(2, 3, 4, 4, 6, 8), d.size(), d.flag(0.4)
    each = d.rng.randint(1, min(experts, 3))
    gated, turned = d.flag(), d.flag()
    setup = _expert_weights(d, experts, hidden, gated, turned, biased)
    lines = _gate(d, experts, each)
    count = (
        f"offs = torch.histc(ids.float(), {experts}, 0, {experts - 1}).cumsum(0, dtype=torch.int32)"
    )
    if d.flag(0.5):
        lines += ["ids, order = torch.sort(chosen.reshape(-1))", count]
        back = ["back = torch.empty_like(order)", "back[order] = torch.arange(len(order))"]
    else:
        lines += [
            "order = torch.argsort(chosen.reshape(-1))",
            "ids = chosen.reshape(-1)[order]",
            count,
        ]
        back = ["back = torch.argsort(order)"]
    source = f"rows[{d.pick('order // ' + str(each), 'order.div(' + str(each) + ', rounding_mode=' + repr('floor') + ')')}]"
    if each == 1:
        source = d.pick(source, "rows[order]")
    lines.append(f"y = self.product({source}, self.up{'.transpose(1, 2)' * turned}, offs)")
    lines += ["y = y + self.up_bias[ids]"] * biased
    lines += [
        f"gate, up = y.chunk(2, -1)\n        y = {d.act('gate')} * up"
        if gated
        else f"y = {d.act('y')}"
    ]
    lines.append(f"y = self.product(y, self.down{'.transpose(1, 2)' * turned}, offs)")
    lines += ["y = y + self.down_bias[ids]"] * biased
    scaled = "y = y * weights.reshape(-1)[order].unsqueeze(-1)"
    if d.flag(0.35):
        lines += [scaled, f"out = torch.zeros_like(rows).index_add(0, order // {each}, y)"]
    elif d.flag(0.3):
        lines += [
            *back,
            "y = y[back]",
            "y = y * weights.reshape(-1, 1)",
            f"out = y.view(-1, {each}, y.shape[-1]).sum(1)",
        ]
    else:
        lines += [scaled, *back, f"out = y[back].view(-1, {each}, y.shape[-1]).sum(1)"]
    return _result(d, setup, lines, experts, shared=d.flag(0.3))


@block("tokens rows", weight=1.5)
def dense_experts(d: Draw) -> Block:
    """Every expert on every row, weighted by a routing that is mostly zero."""
    experts, hidden = d.pick(2, 3, 4, 5, 8), d.size()
    each = d.rng.randint(1, min(experts, 2))
    setup = _expert_weights(d, experts, hidden, False, False, False)
    lines = _gate(d, experts, each)
    lines.append(
        f"routing = torch.zeros(rows.shape[0], {experts}, dtype=x.dtype).scatter(1, chosen, weights)"
    )
    lines += d.pick(
        [
            "y = torch.einsum('nd,edh->neh', rows, self.up)",
            f"y = {d.act('y')}",
            "out = torch.einsum('neh,ehd,ne->nd', y, self.down, routing)",
        ],
        [
            "y = torch.bmm(rows.expand(len(self.up), -1, -1), self.up)",
            f"y = torch.bmm({d.act('y')}, self.down)",
            "out = (y * routing.t().unsqueeze(-1)).sum(0)",
        ],
        [
            "out = torch.zeros_like(rows)",
            f"for e in range({experts}):\n            out = out + routing[:, e, None] * ({d.act('rows @ self.up[e]')} @ self.down[e])",
        ],
    )
    return _result(d, setup, lines, experts)


@block("tokens", weight=1)
def buffered_experts(d: Draw) -> Block:
    """Rows in buffers of fixed size for each expert, those beyond dropped (GShard)."""
    experts, hidden, capacity = d.pick(2, 3, 4), d.size(), d.pick(1, 2, 3)
    setup = _expert_weights(d, experts, hidden, False, False, False)
    lines = _gate(d, experts, 1)
    lines += [
        f"mask = F.one_hot(chosen[:, 0], {experts})",
        "place = (mask.cumsum(0) - 1) * mask",
        f"mask = (mask * (place < {capacity})).to(x.dtype)",
        f"place = F.one_hot(place.sum(-1).clamp(max={capacity - 1}), {capacity}).to(x.dtype)",
        "sent = torch.einsum('ne,nc->nec', mask, place)",
        "y = torch.einsum('nec,nd->ecd', sent, rows)",
        f"y = torch.bmm({d.act('torch.bmm(y, self.up)')}, self.down)",
        "out = torch.einsum('nec,ecd,n->nd', sent, y, weights[:, 0])",
    ]
    return _result(d, setup, lines, experts)


def _expert_weights(
    d: Draw, experts: int, hidden: int, gated: bool, turned: bool, biased: bool
) -> list[str]:
    wide = hidden * (2 if gated else 1)
    up, down = (d.last, wide), (hidden, d.last)
    up, down = (up[::-1], down[::-1]) if turned else (up, down)
    lines = [
        f"self.gate = nn.Linear({d.last}, {experts}, bias={d.flag(0.3)})",
        f"self.up = nn.Parameter(torch.randn({experts}, {up[0]}, {up[1]}) / 3)",
        f"self.down = nn.Parameter(torch.randn({experts}, {down[0]}, {down[1]}) / 3)",
        "self.product = grouped_product",
    ]
    if biased:
        lines.append(f"self.up_bias = nn.Parameter(torch.randn({experts}, {wide}))")
        lines.append(f"self.down_bias = nn.Parameter(torch.randn({experts}, {d.last}))")
    return lines


def _gate(d: Draw, experts: int, each: int) -> list[str]:
    lines = [
        "shape, rows = x.shape, x.reshape(-1, x.shape[-1])",
        f"scores = self.gate(rows).{d.pick('softmax(-1)', 'softmax(-1)', 'sigmoid()')}",
        f"weights, chosen = scores.topk({each}, -1)",
    ]
    if d.flag(0.3):
        lines.append("weights = weights / weights.sum(-1, keepdim=True)")
    return lines


def _result(
    d: Draw, setup: list[str], lines: list[str], experts: int, shared: bool = False
) -> Block:
    """The block, with an expert for all rows or the loss that balances routing, or neither."""
    if shared:
        setup.append(f"self.shared = nn.Linear({d.last}, {d.last})")
        lines.append("out = out + self.shared(rows)")
    auxiliary = d.flag(0.35)
    end = "return x + out.view(shape)"
    if auxiliary:
        lines.append(f"share = F.one_hot(chosen, {experts}).to(x.dtype).sum(1).mean(0)")
        end += f", {experts} * (share * scores.mean(0)).sum() * 0.1"
    return Block("\n        ".join(setup), "\n        ".join([*lines, end]), d.shape, auxiliary)
