"""The blocks that products have by default on a CPU."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.machines import Cpu
from tvm_axe.machines.register_tiles import half_cycles
from tvm_axe.tile.kernels.tiling import cpu_block


@pytest.mark.parametrize(
    "m, n, k, block",
    [
        (512, 1024, 512, (512, 128, 512)),
        (497, 1003, 301, (497, 144, 301)),  # 1,008 columns instead of 1,024
        (2048, 2048, 2048, (512, 128, 256)),
        (64, 768, 768, (64, 128, 768)),
    ],
)
def test_a_cores_block(m, n, k, block):
    assert cpu_block(Cpu(processors=1, vector_bits=512, vector_registers=32), {"m": m, "n": n, "k": k}) == block


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 5000),
    st.integers(1, 8),
    st.sampled_from([128, 256, 512]),
)
def test_no_core_has_more_to_do_than_with_the_usual_width(m, n, k, processors, bits):
    cpu = Cpu(processors=processors, vector_bits=bits, vector_registers=16)
    rows, columns, terms = cpu_block(cpu, {"m": m, "n": n, "k": k})
    lanes = bits // 32

    def busiest(width):
        blocks = math.ceil(math.ceil(m / rows) * math.ceil(n / width) / processors)
        return blocks * half_cycles(rows, width, lanes, 16)

    assert columns % lanes == 0 and 1 <= rows <= min(m, 512) and terms <= 1024
    assert math.ceil(k / terms) * terms - k < math.ceil(k / terms)  # parts are as even as they can be
    usual = 128 if math.ceil(m / rows) * math.ceil(n / 128) >= 2 * processors else 64
    assert busiest(columns) <= busiest(usual)
