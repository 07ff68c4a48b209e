"""Machine code for this processor: LLVM compiles a function in memory, in a tenth of a second, without writing files.

Loops work on vectors of lanes, which LLVM splits into the vectors that the processor has.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir

BITS_8, BITS_16, BITS_32, BITS_64 = (ir.IntType(width) for width in (8, 16, 32, 64))
FLOAT32 = ir.FloatType()
POINTER = ir.PointerType()
Function: TypeAlias = Callable[..., int]
"""Takes addresses and numbers, and returns an unsigned number. Runs without holding the GIL."""
_IN_CTYPES = {POINTER: ctypes.c_void_p, BITS_64: ctypes.c_int64}
LOOKS_UP = "avx512vbmi"
"""The CPU feature that looks up 64 bytes at once."""
# llvmlite treats any attribute of its library, even __dict__, as a function of LLVM. Code that walks the objects of all
# modules, as vLLM does when an engine starts on a CPU, would fail on that one.
llvm.ffi.lib._fntab["__dict__"] = {}


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """A number, in every lane if `kind` is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


@cache
def processor_has(feature: str) -> bool:
    """Whether this processor has a feature, under LLVM's name for it."""
    return bool(llvm.get_host_cpu_features().get(feature))


def vector(of: ir.Type, lanes: int) -> ir.Type:
    """A vector type of `lanes` elements; for one lane, the element type itself."""
    return of if lanes == 1 else ir.VectorType(of, lanes)


class Builder(ir.IRBuilder):
    """Builds a function of addresses and integers that returns 32 bits; its pointers must not alias.

    Memory may be accessed at any address, aligned or not.
    """

    def __init__(self, name: str, arguments: Sequence[ir.Type]) -> None:
        function = ir.Function(ir.Module(name), ir.FunctionType(BITS_32, arguments), name)
        for argument in function.args:
            if argument.type == POINTER:
                argument.add_attribute("noalias")
        super().__init__(function.append_basic_block())

    @contextmanager
    def loop(self, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """Repeat the body built inside for each number from `start` up to but excluding `stop`, both of 64 bits."""
        before = self.block
        head, body, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        number = self.phi(BITS_64)
        number.add_incoming(start, before)
        self.cbranch(self.icmp_signed("<", number, stop), body, after)
        self.position_at_end(body)
        yield number
        number.add_incoming(self.add(number, constant(BITS_64, step)), self.block)
        self.branch(head)
        self.position_at_end(after)

    def across(self, start: ir.Value, stop: ir.Value, lanes: int, work: Callable[[ir.Value, int], None]) -> None:
        """Build `work` for as many whole vectors as there are, and again for the remaining single elements.

        It gets the index of its first element, and the number of elements.
        """
        whole = self.and_(self.sub(stop, start), constant(BITS_64, -lanes))
        middle = self.add(start, whole)
        for first, last, width in ((start, middle, lanes), (middle, stop, 1)):
            with self.loop(first, last, width) as number:
                work(number, width)

    def element(self, base: ir.Value, number: ir.Value, kind: ir.Type) -> ir.Value:
        """The address of element `number` of an array of type `kind` at `base`."""
        return self.gep(base, [number], source_etype=kind)

    def read(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """Load the value at an address."""
        return self.load(address, align=1, typ=kind)

    def write(self, address: ir.Value, value: ir.Value) -> None:
        """Store a value at an address."""
        self.store(value, address, align=1)

    def write_past_caches(self, address: ir.Value, value: ir.Value) -> None:
        """Store a vector, bypassing the caches; the address must be a multiple of its size.

        No cache line is read or filled for it. Other threads see such stores in order only after a `fence`.
        """
        hint = self.module.add_metadata([constant(BITS_32, 1)])
        size = value.type.count * value.type.element.width // 8
        self.store(value, address, align=size).set_metadata("nontemporal", hint)

    def variable(self, start: ir.Constant) -> ir.Value:
        """A variable that starts as `start`; it becomes a register if it is created before the first loop."""
        place = self.alloca(start.type)
        self.store(start, place)
        return place

    def keep_largest(self, place: ir.Value, value: ir.Value) -> None:
        """Update a variable to the maximum of itself and an unsigned number, lane by lane."""
        self.store(self.larger(self.load(place, typ=value.type), value), place)

    def larger(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """The larger of two unsigned numbers, lane by lane."""
        return self.select(self.icmp_unsigned(">", one, other), one, other)

    def smaller(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """The smaller of two unsigned numbers, lane by lane."""
        return self.select(self.icmp_unsigned("<", one, other), one, other)

    def largest_lane(self, lanes: ir.Value) -> ir.Value:
        """The largest of the unsigned lanes."""
        kind = lanes.type
        return self.intrinsic(f"llvm.vector.reduce.umax.v{kind.count}i{kind.element.width}", kind.element, lanes)

    def spread(self, value: ir.Value, lanes: int) -> ir.Value:
        """The value in every lane."""
        if lanes == 1:
            return value
        undefined = ir.Constant(vector(value.type, lanes), ir.Undefined)
        first = self.insert_element(undefined, value, constant(BITS_32, 0))
        return self.shuffle_vector(first, undefined, constant(vector(BITS_32, lanes), 0))

    def pairs(self, pair: tuple[ir.Value, ir.Value], kind: ir.Type) -> ir.Value:
        """A vector of `kind` whose lanes alternate between two numbers."""
        two = ir.Constant(vector(kind.element, 2), ir.Undefined)
        for lane, number in enumerate(pair):
            two = self.insert_element(two, number, constant(BITS_32, lane))
        return self.shuffle_vector(two, two, ir.Constant(vector(BITS_32, kind.count), [0, 1] * (kind.count // 2)))

    def look_up(self, table: tuple[ir.Value, ir.Value], numbers: ir.Value) -> ir.Value:
        """Look up 64 numbers in a table of 128 bytes, ignoring the numbers' eighth bit. Requires `LOOKS_UP`."""
        low, high = table
        return self.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", numbers.type, low, numbers, high)

    def prefetch(self, address: ir.Value) -> None:
        """Prefetch a cache line into the second-level cache for reading; the address may be invalid."""
        hints = [constant(BITS_32, hint) for hint in (0, 2, 1)]
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), address, *hints)

    def intrinsic(self, name: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call an intrinsic function of LLVM."""
        declared = self.module.globals.get(name)
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.call(declared or ir.Function(self.module, kind, name), arguments)

    def copy_bytes(self, target: ir.Value, source: ir.Value, nbytes: ir.Value) -> None:
        """Copy memory from one address to another."""
        may_be_cut = constant(ir.IntType(1), 0)
        self.intrinsic("llvm.memcpy.p0.p0.i64", ir.VoidType(), target, source, nbytes, may_be_cut)

    def compiled(self, result: ir.Value) -> Function:
        """Finish and compile the function, which returns `result`."""
        self.ret(result)
        return _Compiled(self.function)


class _Compiled:
    """A compiled function, and the compiler, which owns the machine code."""

    def __init__(self, function: ir.Function) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(str(function.module))
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        # The loops are vectorised already, so LLVM does not have to do it.
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_vectorization = tuning.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        arguments = [_IN_CTYPES[argument.type] for argument in function.args]
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint32, *arguments)(self._engine.get_function_address(function.name))

    def __call__(self, *arguments: int) -> int:
        return self._call(*arguments)
