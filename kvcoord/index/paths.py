"""Ways through the tree: along a path of page keys, splitting runs where an operation begins or ends, and tidying up.

Knows the shape of the tree only; what a run's pages are counted as is the tiers' business.
"""

from collections.abc import Iterator, Sequence

from kvcoord.domain import PageKey
from kvcoord.index.node import Node


def walk(root: Node, path: Sequence[PageKey], end: int) -> Iterator[tuple[Node, int, int]]:
    """The runs along `path[:end]`: run, position of its first page, pages shared. The caller may split the last."""
    position = 0
    children = root.children
    while position < end:
        node = children.get(path[position])
        if node is None:
            return
        shared = node.shared(path, end)
        whole = shared == len(node.keys)
        children = node.children
        yield node, position, shared
        if not whole:
            return
        position += shared


def cover(root: Node, path: Sequence[PageKey], first: int, end: int) -> list[Node]:
    """Runs that are exactly pages [first, end), split out of longer ones, made where pages were unknown."""
    nodes: list[Node] = []
    if first == end:
        return nodes
    node = root
    position = 0
    while position < end:
        stop = first if position < first else end
        child = node.children.get(path[position])
        if child is None:
            child = node.append(list(path[position:stop]))
        else:
            shared = child.shared(path, stop)
            if shared < len(child.keys):
                child = child.split(shared)
        node = child
        position = node.end
        if position > first:
            nodes.append(node)
    return nodes


def tidy(nodes: list[Node], first: int) -> None:
    """After a change of the pages from `first` on, in `nodes`: drop runs that hold nothing, fuse runs alike."""
    if not nodes:
        return
    node = nodes[-1]
    while node.parent is not None and not node.children and not node.resident:
        node = node.detach()
    top = min(first, node.end)
    while node.parent is not None and node.end >= top:
        parent = node.parent
        node.fuse()
        node = parent


def parents_first(root: Node) -> Iterator[Node]:
    """Every run of the tree, the root with its no pages first."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
