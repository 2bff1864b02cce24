"""Special functions: element by element, linear in nothing."""

from __future__ import annotations

from weft.ops.rule import aten, rule
from weft.ops.rules.common import pointwise

UNARY = """
    polygamma special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_erfcx special_i0e special_i1 special_i1e special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 frexp.Tensor"""

# Two arguments that broadcast; each polynomial of degree `n` at `x`.
BINARY = """
    gcd lcm nextafter special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta"""

rule(aten(UNARY), pointwise)
rule(aten(BINARY), pointwise)
