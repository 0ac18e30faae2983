"""Lowering passes that let torch-tensorrt keep the writes of a program, in place and in order."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from dsv4_ops.core.registry import NAMESPACE, OPS, OpSpec
from dsv4_ops.core.torch_compat import auto_functionalized_v2
from dsv4_ops.integrations.tensorrt import writes

_COPY = torch.ops.aten.copy_.default
_COPIED = torch.ops.aten.copy.default


def keep_writes(gm: GraphModule, settings: Any = None) -> GraphModule:
    """Replace writes with ops that torch-tensorrt neither removes nor moves.

    An op of ours writes in place if it writes to a whole input or buffer whose old values no later
    node reads. The results of all other writes, such as writes through a view, are copied back.
    """
    _Writes(gm.graph).run()
    gm.graph.lint()
    gm.recompile()
    return gm


def remove_unread(gm: GraphModule, settings: Any = None) -> GraphModule:
    """Remove nodes without readers and without effects. This pass replaces a pass of torch-tensorrt
    that also removes writes."""
    for node in reversed(gm.graph.nodes):
        guards = node.op == "call_module" and "_guards_fn" in str(node.target)
        kept = node.op in ("placeholder", "output") or (node.is_impure() and not guards)
        if not node.users and not kept:
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    return gm


@dataclass
class _Writes:
    graph: Graph
    root: dict[Node, Node] = field(default_factory=dict)
    """Map from a node to the input or buffer whose memory the node uses."""

    def run(self) -> None:
        self._skip_copies()
        self._name_states()
        for node in list(self.graph.nodes):
            if node.target is auto_functionalized_v2:
                spec = _spec_of(node.args[0])
                if spec is not None:
                    self._write_in_place(spec, node)
        for node in list(self.graph.nodes):
            if node.target is _COPY and node.args[0] in self.root:
                self._copy_back(node)

    def _skip_copies(self) -> None:
        """Remove functional copies that do not change dtype, device or shape. A second
        decomposition of a program adds these copies."""
        for node in list(self.graph.nodes):
            if node.target is _COPIED and not _is_cast(*node.args[:2]):
                node.replace_all_uses_with(node.args[1], propagate_meta=False)
                self.graph.erase_node(node)

    def _name_states(self) -> None:
        """Pass written buffers through an op, so that torch-tensorrt does not fold the buffers into
        constants.

        All uses of a buffer then read the result of this op. Inputs need no such op.
        """
        copied = [node for node in self.graph.nodes if node.target is _COPY]
        written = {node.args[0].target for node in copied if node.args[0].op == "get_attr"}
        first: dict[Any, Node] = {}
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.root[node] = node
            elif node.op == "get_attr" and node.target in written:
                state = first.get(node.target)
                if state is None:
                    with self.graph.inserting_after(node):
                        state = self.graph.call_function(writes.state, (node,))
                    state.meta = dict(node.meta)
                    first[node.target] = self.root[state] = state
                node.replace_all_uses_with(
                    state, delete_user_cb=lambda user, own=state: user != own
                )

    def _write_in_place(self, spec: OpSpec, node: Node) -> None:
        kwargs: dict[str, Any] = dict(node.kwargs)
        bases = kwargs.pop("_all_bases")
        names = [spec.parameters[place] for place in spec.mutated]
        places = [kwargs.pop(f"_{name}_base_index") for name in names]
        if set(kwargs) | set(names) != set(spec.parameters) or len(set(places)) < len(places):
            return  # the op writes through a view, or writes one tensor twice
        order = {each: index for index, each in enumerate(self.graph.nodes)}
        before: dict[Node, None] = {}
        for base in (bases[place] for place in places):
            users = dict.fromkeys(_readers(base))
            late = [user for user in users if order[user] > order[node]]
            if base not in self.root or any(_reads(user, base, users) for user in late):
                return  # neither input nor buffer, or a later node reads the old values
            before |= dict.fromkeys(user for user in users if order[user] < order[node])
        kwargs |= {name: bases[place] for name, place in zip(names, places, strict=True)}
        kwargs["after"] = [found for user in before if (found := self._made(user)) is not None]
        with self.graph.inserting_before(node):
            new = self.graph.call_function(writes.write_op(spec.name), (), kwargs)
        results = len(spec.op._schema.returns)
        values = tuple(node.meta["val"])
        kept = values[:results] + tuple(values[max(results, 1) + place] for place in places)
        new.meta = {**node.meta, "val": kept if len(kept) > 1 else kept[0]}
        parts = [self._part(new, index, len(kept)) for index in range(len(kept))]
        for name, part in zip(names, parts[results:], strict=True):
            self.root[part] = self.root[kwargs[name]]
        moved = dict(enumerate(parts[:results]))
        for part, place in zip(parts[results:], places, strict=True):
            moved[max(results, 1) + place] = part
        for user in list(node.users):
            user.replace_all_uses_with(moved[cast("int", user.args[1])], propagate_meta=False)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _part(self, node: Node, index: int, count: int) -> Node:
        if count == 1:
            return node
        with self.graph.inserting_after(node):
            part = self.graph.call_function(operator.getitem, (node, index))
        part.meta = {**node.meta, "val": node.meta["val"][index]}
        return part

    def _made(self, node: Node) -> Node | None:
        """Return a tensor that ``node`` computes, or None."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return node
        if not isinstance(value, tuple | list):
            return None  # a size: no write changes sizes
        index = next((i for i, each in enumerate(value) if isinstance(each, Tensor)), None)
        if index is None:
            return None
        known = (user for user in node.users if user.target is operator.getitem)
        found = next((user for user in known if user.args[1] == index), None)
        return self._part(node, index, len(value) + 1) if found is None else found

    def _copy_back(self, node: Node) -> None:
        target, source = cast("tuple[Node, Node]", node.args[:2])
        if self.root.get(source) is self.root[target]:
            node.replace_all_uses_with(source)
        else:
            order = {each: index for index, each in enumerate(self.graph.nodes)}
            same = [each for each, root in self.root.items() if root is self.root[target]]
            users = dict.fromkeys(user for each in same for user in _readers(each))
            before = [user for user in users if order[user] < order[node] and user is not source]
            after = [found for user in before if (found := self._made(user)) is not None]
            with self.graph.inserting_before(node):
                new = self.graph.call_function(writes.copy_back, (target, source, after))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
        self.graph.erase_node(node)


def _is_cast(target: Node, source: Node) -> bool:
    """Whether a copy changes dtype, device or shape."""
    values = (target.meta["val"], source.meta["val"])
    first, second = ((each.dtype, each.device, each.shape) for each in values)
    return bool(first != second)


def _spec_of(op: Any) -> OpSpec | None:
    namespace, _, name = str(getattr(op, "name", lambda: "")()).partition("::")
    return OPS.get(name) if namespace == NAMESPACE else None


def _readers(node: Node) -> Iterator[Node]:
    """Yield the users of ``node`` and of its views."""
    for user in node.users:
        yield user
        returned = getattr(getattr(user.target, "_schema", None), "returns", ())
        aliases = [each.alias_info for each in returned if each.alias_info is not None]
        if user.target is operator.getitem or any(not each.is_write for each in aliases):
            yield from _readers(user)


def _reads(user: Node, base: Node, readers: Container[Node]) -> bool:
    """Whether ``user``, which uses ``base`` or a view of ``base``, reads the values. A copy into
    ``base`` reads the values only if the source of the copy is ``base`` or one of ``readers``."""
    copies = user.target is _COPY and user.args[0] is base
    return not copies or user.args[1] is base or user.args[1] in readers
