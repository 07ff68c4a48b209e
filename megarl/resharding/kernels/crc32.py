"""CRC-32 in machine code, of vectors that a function already holds in registers, or of memory.

A vector's bits are the coefficients of a polynomial. Each vector is XORed with the one a step before it, multiplied by
the power of x between the two modulo the CRC's polynomial: carry-less multiplications (Gopal et al., "Fast CRC
Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009). The result is that of zlib's crc32.
"""

from collections.abc import Sequence
from functools import cache

from llvmlite import ir

from converters.machine_code import BITS_8, BITS_32, BITS_64, Builder, constant, processor_has, vector

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_WIDTHS = {8: ("vpclmulqdq", "avx512f"), 4: ("vpclmulqdq", "avx2"), 2: ("pclmulqdq",)}
"""64-bit lanes of a vector -> CPU features needed for carry-less multiplication of such vectors."""
VECTORS = 4
"""Vectors of a step: enough independent multiplications to hide the latency of one."""


def known_lanes() -> list[int]:
    """The vector widths, in 64-bit lanes, for which this CPU has carry-less multiplication, widest first."""
    return [lanes for lanes, features in _WIDTHS.items() if all(map(processor_has, features))]


@cache
def widest_lanes() -> int:
    """The widest of `known_lanes`; 0 if there are none."""
    return max(known_lanes(), default=0)


class Crc32:
    """Generates the code that computes a checksum; `before` is that of all earlier bytes, as a 64-bit value."""

    def __init__(self, build: Builder, before: ir.Value, lanes: int) -> None:
        self._build = build
        self.vector = vector(BITS_64, lanes)
        self.vector_bytes = 8 * lanes
        self.step_bytes = VECTORS * self.vector_bytes
        self._last = [build.variable(constant(self.vector, 0)) for _ in range(VECTORS)]
        """The running sums: one per vector of a step."""
        self._start = build.variable(constant(self.vector, 0))
        """The initial value, which is XORed into the first vector: a CRC starts with all ones and is inverted at the
        end.
        """
        bits = build.zext(build.not_(build.trunc(before, BITS_32)), BITS_64)
        build.store(build.insert_element(constant(self.vector, 0), bits, constant(BITS_32, 0)), self._start)

    def add(self, vectors: Sequence[ir.Value]) -> None:
        """Add the next vectors: a whole step, or one vector."""
        build = self._build
        last = [build.load(place, typ=self.vector) for place in self._last]
        for number, each in enumerate(vectors):
            own = each if number else build.xor(each, build.load(self._start, typ=self.vector))
            last.append(build.xor(self._moved(last.pop(0), 8 * self.step_bytes), own))
        build.store(constant(self.vector, 0), self._start)
        for value, place in zip(last, self._last, strict=True):
            build.store(value, place)

    def skip(self, powers: tuple[ir.Value, ir.Value]) -> None:
        """Add as many zero bytes as `powers_of` was given; later data may be XORed onto their positions."""
        by = self._build.pairs(powers, self.vector)
        for place in (*self._last, self._start):
            self._build.store(self._times(self._build.load(place, typ=self.vector), by), place)

    def after(self, earlier: ir.Value, powers: tuple[ir.Value, ir.Value], vectors: ir.Value) -> ir.Value:
        """Shift `earlier` by as many bytes as `powers_of` was given, and XOR it with `vectors`."""
        return self._build.xor(self._times(earlier, self._build.pairs(powers, self.vector)), vectors)

    def add_memory(self, base: ir.Value, start: ir.Value, stop: ir.Value) -> ir.Value:
        """Add the whole vectors of memory from `start` to `stop` bytes after `base`; return where they end."""
        build = self._build
        whole = build.add(start, build.and_(build.sub(stop, start), constant(BITS_64, -self.vector_bytes)))
        steps = build.add(start, build.and_(build.sub(stop, start), constant(BITS_64, -self.step_bytes)))
        for first, last, vectors in ((start, steps, VECTORS), (steps, whole, 1)):
            with build.loop(first, last, vectors * self.vector_bytes) as at:
                self.add(self.vectors_at(build.element(base, at, BITS_8), vectors))
        return whole

    def vectors_at(self, address: ir.Value, count: int) -> list[ir.Value]:
        """Load `count` vectors from memory."""
        build = self._build
        return [
            build.read(build.element(address, constant(BITS_64, at), self.vector), self.vector) for at in range(count)
        ]

    def result(self, base: ir.Value, start: ir.Value, stop: ir.Value) -> ir.Value:
        """The checksum, after the last bytes, fewer than a vector: those from `start` to `stop` after `base`."""
        build = self._build
        register = build.variable(constant(BITS_32, 0))
        lanes = build.alloca(vector(BITS_64, 2))
        build.store(self._sum(), lanes)
        self._add_bytes(register, lanes, constant(BITS_64, 0), constant(BITS_64, 16))
        first = build.extract_element(build.load(self._start, typ=self.vector), constant(BITS_32, 0))
        build.store(build.xor(build.load(register, typ=BITS_32), build.trunc(first, BITS_32)), register)
        self._add_bytes(register, base, start, stop)
        return build.not_(build.load(register, typ=BITS_32))

    def _sum(self) -> ir.Value:
        """Reduce everything added so far to two lanes with the same remainder."""
        build = self._build
        total = constant(vector(BITS_64, 2), 0)
        for place in self._last:
            last = build.load(place, typ=self.vector)
            for lane in range(0, self.vector.count, 2):
                pair = ir.Constant(vector(BITS_32, 2), [lane, lane + 1])
                total = build.xor(self._moved(total, 128), build.shuffle_vector(last, last, pair))
        return total

    def _moved(self, value: ir.Value, bits: int) -> ir.Value:
        """Multiply each pair of lanes by x to the power of `bits`, modulo the polynomial."""
        return self._times(value, ir.Constant(value.type, _powers(bits) * (value.type.count // 2)))

    def _times(self, value: ir.Value, powers: ir.Value) -> ir.Value:
        lanes = value.type.count
        name = "llvm.x86.pclmulqdq" + (f".{64 * lanes}" if lanes > 2 else "")
        low, high = (
            self._build.intrinsic(name, value.type, value, powers, constant(BITS_8, lane)) for lane in (0x00, 0x11)
        )
        return self._build.xor(low, high)

    def _add_bytes(self, register: ir.Value, base: ir.Value, start: ir.Value, stop: ir.Value) -> None:
        """Add bytes bit by bit, by the definition of the CRC."""
        build = self._build
        with build.loop(start, stop) as at:
            byte = build.zext(build.read(build.element(base, at, BITS_8), BITS_8), BITS_32)
            bits = build.xor(build.load(register, typ=BITS_32), byte)
            for _ in range(8):
                lowest = build.sub(constant(BITS_32, 0), build.and_(bits, constant(BITS_32, 1)))
                bits = build.xor(
                    build.lshr(bits, constant(BITS_32, 1)), build.and_(lowest, constant(BITS_32, _POLYNOMIAL))
                )
            build.store(bits, register)


def powers_of(nbytes: int) -> list[int]:
    """The two 64-bit multipliers that shift a sum by `nbytes` bytes."""
    return _powers(8 * nbytes)


def _powers(bits: int) -> list[int]:
    # Bits are in reverse order, so the low lane holds the higher powers.
    return [_power(bits + 32), _power(bits - 32)]


@cache
def _power(exponent: int) -> int:
    """x to the power of `exponent`, modulo the polynomial: its bits are reversed, in the upper 32 of 33 bits."""
    # The polynomial is primitive, so powers of x have period 2^32 - 1.
    left, found, square = exponent % (2**32 - 1), _ONE, _ONE >> 1
    while left:
        if left & 1:
            found = _product(found, square)
        left, square = left >> 1, _product(square, square)
    return found << 1


def _product(one: int, other: int) -> int:
    """The product of two bit-reversed polynomials of 32 bits, modulo the polynomial."""
    total = 0
    for bit in range(32):
        if other & (_ONE >> bit):
            total ^= one
        one = (one >> 1) ^ (_POLYNOMIAL if one & 1 else 0)
    return total
