"""Blocks of linear algebra, einsum and complex numbers."""

from __future__ import annotations

from tools.random_programs.blocks.block import Block, Draw, block


@block("rows tokens", weight=0.8)
def einsums(d: Draw) -> Block:
    """Products with repeated, broadcast and free letters."""
    width = d.size()
    setup = (
        f"self.weight = nn.Parameter(torch.randn({d.last}, {width}, 2) / {d.last + width} ** 0.5)"
    )
    forward, shape = d.pick(
        ("return torch.einsum('...i,iok,...i->...o', x, self.weight, x)", d.with_last(width)),
        (
            "return torch.einsum('...i,iok->...ko', x, self.weight).flatten(-2)",
            d.with_last(2 * width),
        ),
        ("return torch.einsum('...i,iok,jok->...j', x, self.weight, self.weight)", d.shape),
        ("return x + torch.einsum('...i,...j,iok->...i', x, x, self.weight) / 9", d.shape),
        ("return torch.tensordot(x, self.weight, dims=1).sum(-1)", d.with_last(width)),
    )
    return Block(setup, forward, shape)


@block("rows tokens", weight=0.8)
def matrices(d: Draw) -> Block:
    """Solutions, factors and functions of a small matrix that is made of a parameter, or of the data."""
    setup = f"self.weight = nn.Parameter(torch.randn({d.last}, {d.last}) / {d.last})"
    of_data = "x.unsqueeze(-1) * x.unsqueeze(-2) / (1 + x.square().sum(-1)[..., None, None])"
    matrix = d.pick("self.weight", "self.weight", of_data)
    made = d.pick(
        "torch.linalg.solve(m, x.unsqueeze(-1)).squeeze(-1)",
        "(torch.linalg.cholesky(m) @ x.unsqueeze(-1)).squeeze(-1)",
        "(torch.linalg.inv(m) @ x.unsqueeze(-1)).squeeze(-1)",
        "x * torch.linalg.slogdet(m).logabsdet.unsqueeze(-1)",
        "x * torch.logdet(m).unsqueeze(-1)",
        "(torch.linalg.matrix_exp(m * 0.1) @ x.unsqueeze(-1)).squeeze(-1)",
        "torch.linalg.solve_triangular(m.tril(), x.unsqueeze(-1), upper=False).squeeze(-1)",
        "(m.matrix_power(2) @ x.unsqueeze(-1)).squeeze(-1)",
        "x * torch.linalg.eigvalsh(m)",
        "x + m.diagonal(dim1=-2, dim2=-1)",
        "x * torch.linalg.matrix_norm(m)[..., None]",
    )
    forward = f"""
        m = {matrix}
        m = m @ m.mT + 2 * torch.eye(m.shape[-1], dtype=m.dtype)
        return {made}"""
    return Block(setup, forward, d.shape)


@block("rows tokens", weight=0.7)
def complex_layers(d: Draw) -> Block:
    """Complex numbers inside: products, moduli, angles."""
    width = d.size()
    setup = f"""
        self.real = nn.Parameter(torch.randn({d.last}, {width}) / {d.last})
        self.imag = nn.Parameter(torch.randn({d.last}, {width}) / {d.last})"""
    made = d.pick(
        "z.abs()",
        "(z * z.conj()).real",
        "torch.view_as_real(z).sum(-1)",
        "z.real + z.imag",
        "(z / (1 + z.abs())).real",
        "torch.exp(z * 0.1j).imag",
        "(z.mH if z.dim() == 2 else z.mT.conj()).mT.imag",
    )
    forward = f"""
        z = torch.complex(x, x.roll(1, -1)) @ torch.complex(self.real, self.imag)
        return {made}.to(x.dtype)"""
    return Block(setup, forward, d.with_last(width))


@block("rows", weight=0.6)
def products_of_the_batch(d: Draw) -> Block:
    """Matrices over the batch: covariances, whitening, Gram matrices."""
    forward = d.pick(
        "return x + x @ (x.t() @ x) / (x.shape[0] * 4)",
        "c = x - x.mean(0)\n        return c @ torch.linalg.inv(c.t() @ c / x.shape[0] + torch.eye(x.shape[1], dtype=x.dtype))",
        "return x + torch.kron(x.mean(0), torch.ones(1, dtype=x.dtype))",
        "return x * torch.outer(x.mean(1), x.mean(0)).tanh()",
        "return x + torch.addr(x, x[:, 0], x[0]) / 4",
        "return torch.addmm(x, x @ x.t(), x, beta=0.5, alpha=0.1)",
        "return x + torch.block_diag(x.mean(0, keepdim=True), torch.ones(1, 1, dtype=x.dtype))[:1, :-1]",
    )
    return Block("", forward, d.shape)
