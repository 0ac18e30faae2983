"""Put launches of Gluon kernels into AOTInductor packages, as the kernel's binary and C++ code that
launches the binary. Inductor itself compiles and packages only Triton kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dsv4_ops.core.target import HOPPER
from dsv4_ops.kernels.aot import compile
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.aot.launch_op import ALIGNED, KERNELS, Rest, launch_hopper
from dsv4_ops.lowering import _compat
from dsv4_ops.lowering._compat import V
from dsv4_ops.lowering.register import lower_with

_ALIGNMENT = 16

_written: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""For each graph, the names of the binaries that its C++ code already contains."""

_binaries: dict[Any, Binary] = {}
"""Compiled kernels, keyed by name, properties of the arguments, and options."""


def register() -> None:
    """Register the lowering of the op that launches Gluon kernels, once."""
    lower_with(launch_hopper, _lower)


def _lower(
    name: str,
    written: Sequence[Any],
    read: Sequence[Any],
    numbers: Sequence[Any],
    grid: Sequence[Any],
    text: str,
) -> None:
    lists = {"written": list(written), "read": list(read)}
    rest, names = Rest.of(text), KERNELS[name].arg_names
    for parameter in ALIGNED.get(name, ()):
        kind, place = rest.order[names.index(parameter)]
        lists[kind][place] = _with_alignment(lists[kind][place])
    GluonCall(name, lists["written"], lists["read"], numbers, grid, text)


def _with_alignment(tensor: Any) -> Any:
    """Return ``tensor`` if it is aligned, otherwise an aligned copy with the same strides."""
    kernel = _compat.ExternKernel
    tensor = kernel.realize_input(tensor)
    if _aligned(kernel.unwrap_storage_for_input(tensor)):
        return tensor
    return kernel.require_exact_strides(kernel.copy_input(tensor), tensor.get_stride())


class Binary(NamedTuple):
    """The parts of a compiled kernel that a launch needs.

    Args:
        code: Machine code for the GPU.
        function: Name of the function in the binary.
        warps: Warps per program, in all partitions together.
        shared: Bytes of shared memory per program.
        types: Type of every argument; ``"constexpr"`` for arguments that the binary does not have.
    """

    code: bytes
    function: str
    warps: int
    shared: int
    types: tuple[str, ...]

    @property
    def symbol(self) -> str:
        """Unique name of the binary."""
        return f"dsv4_ops_{self.function}_{hashlib.sha256(self.code).hexdigest()[:16]}"


def binary_of(kernel: Any, arguments: Sequence[Argument | int], options: dict[str, Any]) -> Binary:
    """Compile a kernel for Hopper."""
    key = (kernel.__name__, *arguments, *sorted(options.items()))
    if key not in _binaries:
        major, minor = HOPPER
        kernel_binary = compile.compiled(kernel, arguments, options, 10 * major + minor)
        data = kernel_binary.metadata
        if data.global_scratch_size or data.profile_scratch_size:
            raise RuntimeError(
                f"{kernel.__name__} was compiled to need memory for itself, which a package does "
                "not have for it. Unset the variables that make Triton instrument kernels, such as "
                "TRITON_*."
            )
        types = tuple(kernel_binary.src.signature.values())[: len(arguments)]
        code = kernel_binary.asm["cubin"]
        _binaries[key] = Binary(code, data.name, data.num_warps, data.shared, types)
    return _binaries[key]


class GluonCall(_compat.ExternKernel):
    """A launch in the graph."""

    def __init__(
        self,
        name: str,
        written: Sequence[Any],
        read: Sequence[Any],
        numbers: Sequence[Any],
        grid: Sequence[Any],
        text: str,
    ) -> None:
        realized = [self.realize_input(each) for each in (*written, *read)]
        inputs = [self.unwrap_storage_for_input(each) for each in realized]
        self.device = inputs[0].get_device()
        layout = _compat.NoneLayout(device=self.device)
        super().__init__(None, layout, inputs, (*numbers, *grid))
        self.name_of_kernel, self.text = name, text
        self.num_written, self.num_numbers = len(written), len(numbers)
        self.mutation_outputs = [
            _compat.MutationOutput(_compat.NoneLayout(device=self.device), each, self)
            for each in written
        ]
        V.graph.register_operation(self)

    @property
    def tensors(self) -> list[Any]:
        """Return the tensors that the kernel writes, then the tensors that it reads."""
        return list(self.inputs)

    def get_outputs(self) -> list[Any]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        return _compat.OrderedSet()

    def codegen(self, wrapper: Any) -> None:
        if V.graph.cpp_wrapper:
            self._codegen_cpp(wrapper)
        else:
            wrapper.writeline(self._python(wrapper))

    def _python(self, wrapper: Any) -> str:
        """Return Python code that launches the kernel, because Inductor may run a graph before it
        packages the graph."""
        tensors = [each.codegen_reference() for each in self.tensors]
        sizes = [wrapper.codegen_sizevar(each) for each in self.constant_args]
        lists = [
            *(tensors[: self.num_written], tensors[self.num_written :]),
            *(sizes[: self.num_numbers], sizes[self.num_numbers :]),
        ]
        groups = ", ".join(f"[{', '.join(each)}]" for each in lists)
        op = "torch.ops.dsv4_ops._launch_hopper.default"
        return f"{op}({self.name_of_kernel!r}, {groups}, {self.text!r})"

    def _ordered(self, of_tensors: list[Any], of_numbers: Sequence[Any]) -> list[Any]:
        """Put values into the order of the kernel's arguments."""
        split = self.num_written
        return Rest.of(self.text).arguments(of_tensors[:split], of_tensors[split:], of_numbers)

    def _codegen_cpp(self, wrapper: Any) -> None:
        numbers = self.constant_args[: self.num_numbers]
        described = [Argument.tensor(each.get_dtype(), _aligned(each)) for each in self.tensors]
        arguments = self._ordered(described, [_described(each) for each in numbers])
        options = Rest.of(self.text).options
        binary = binary_of(KERNELS[self.name_of_kernel], arguments, options)
        defined = _written.setdefault(wrapper, set())
        if binary.symbol not in defined:
            defined.add(binary.symbol)
            for line in definition(binary):
                wrapper.header.writeline(line)
        tensors = [each.codegen_reference() for each in self.tensors]
        sizes = [wrapper.codegen_sizevar(each) for each in self.constant_args]
        places = self._ordered([*range(len(tensors))], sizes[: self.num_numbers])
        for line in call(binary, tensors, places, sizes[self.num_numbers :]):
            wrapper.writeline(line)


def _aligned(tensor: Any) -> bool:
    """Return whether a tensor's address is known at compile time to be aligned. The package copies
    inputs that are not aligned."""
    if tensor.get_name() in V.graph.unaligned_buffers:
        return False
    start = tensor.get_layout().offset * tensor.get_dtype().itemsize
    return bool(V.graph.sizevars.statically_known_multiple_of(start, _ALIGNMENT))


def _described(number: Any) -> Argument | int:
    """Describe a number. A symbol is a size or a stride, which Inductor assumes to be below
    2**31."""
    if not getattr(number, "free_symbols", ()):
        return 1 if int(number) == 1 else Argument.number(int(number))
    return Argument("i32", bool(V.graph.sizevars.statically_known_multiple_of(number, _ALIGNMENT)))


def definition(binary: Binary) -> list[str]:
    """Return C++ that contains the binary and loads it, once per GPU. The binary stays loaded after
    the package is unloaded."""
    # always three digits, so that the next character cannot become part of the escape
    code = "".join(f"\\{byte:03o}" for byte in binary.code)
    name = binary.symbol
    return [
        f"#ifndef {name.upper()}",  # two graphs may share a file
        f"#define {name.upper()}",
        "#include <mutex>",
        "#include <unordered_map>",
        f'alignas(16) static const char {name}_code[] = "{code}";',
        f"static CUfunction {name}(int32_t device) {{",
        "    static std::mutex guard;",
        "    static std::unordered_map<int32_t, CUfunction> loaded;",
        "    std::lock_guard<std::mutex> lock(guard);",
        "    auto& kernel = loaded[device];",
        "    if (kernel == nullptr) {",
        f"        const void* code = {name}_code;",
        f'        kernel = loadKernel(code, "{binary.function}", {binary.shared});',
        "    }",
        "    return kernel;",
        "}",
        "#endif",
    ]


_NUMBERS = {"i32": "int32_t", "i64": "int64_t"}


def call(
    binary: Binary, tensors: Sequence[str], arguments: Sequence[str | int], grid: Sequence[str]
) -> list[str]:
    """Return C++ that launches the kernel unless the grid is empty.

    Args:
        binary: The kernel.
        tensors: C++ expressions of the tensors. Each expression is evaluated once, because it may
            own its tensor.
        arguments: Indices of tensors, and numbers in C++, in the kernel's order.
        grid: Number of programs in each dimension.
    """
    lines, places = ["{"], []
    for number, tensor in enumerate(tensors):
        lines.append(f"    const auto& dsv4_ops_tensor_{number} = {tensor};")
    for place, (kind, value) in enumerate(zip(binary.types, arguments, strict=True)):
        if kind == "constexpr":
            continue
        name = f"dsv4_ops_{place}"
        if kind.startswith("*"):
            lines.append(f"    const void* {name} = dsv4_ops_tensor_{value}.data_ptr();")
        else:
            lines.append(f"    {_NUMBERS[kind]} {name} = static_cast<{_NUMBERS[kind]}>({value});")
        places.append(f"const_cast<void*>(static_cast<const void*>(&{name}))")
    sizes = [*grid, "1", "1"][:3]
    axes = "xyz"
    lines += [
        f"    uint32_t dsv4_ops_{axis} = static_cast<uint32_t>({size});"
        for axis, size in zip(axes, sizes, strict=True)
    ]
    names = [f"dsv4_ops_{axis}" for axis in axes]
    return [
        *lines,
        # a Triton kernel takes two scratch addresses after its arguments
        "    void* dsv4_ops_scratch[] = {nullptr, nullptr};",
        "    void* dsv4_ops_all[] = {",
        *(f"        {place}," for place in places),
        "        &dsv4_ops_scratch[0], &dsv4_ops_scratch[1],",
        "    };",
        f"    if ({' && '.join(names)}) {{",
        f"        launchKernel({binary.symbol}(this->device_idx_), {', '.join(names)},",
        f"                     {binary.warps}, {binary.shared}, dsv4_ops_all, stream);",
        "    }",
        "}",
    ]
