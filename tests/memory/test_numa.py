"""Where host memory belongs, on hosts made of files, and that the system takes the wish."""

from pathlib import Path

import pytest

from kvcoord.errors import ConfigError
from kvcoord.memory.geometry import PoolGeometry
from kvcoord.memory.numa import Placement, node_of_pci_device, nodes_with_memory, placement, prefer
from kvcoord.memory.pages import PageMemory

GPU = "0000:3b:00.0"
NUMA_MAPS = Path("/proc/self/numa_maps")


def host(root: Path, nodes: str | None, gpu_node: str | None = None) -> Path:
    """A /sys with these nodes and one GPU."""
    if nodes is not None:
        (root / "devices/system/node").mkdir(parents=True)
        (root / "devices/system/node/has_memory").write_text(nodes + "\n")
    if gpu_node is not None:
        (root / "bus/pci/devices" / GPU).mkdir(parents=True)
        (root / "bus/pci/devices" / GPU / "numa_node").write_text(gpu_node + "\n")
    return root


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3,8", [0, 2, 3, 8]), (None, [0])])
def test_nodes_are_read_as_the_system_writes_them(tmp_path: Path, text: str | None, nodes: list[int]) -> None:
    assert nodes_with_memory(host(tmp_path, text)) == nodes


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None), ("none", None), (None, None)])
def test_a_device_is_on_the_node_that_its_folder_names(tmp_path: Path, text: str | None, node: int | None) -> None:
    assert node_of_pci_device(GPU.upper(), host(tmp_path, "0-1", text)) == node


def test_memory_goes_to_the_gpus_node_unless_another_one_is_asked_for(tmp_path: Path) -> None:
    sysfs = host(tmp_path, "0-1", "1")
    assert placement(None, GPU, sysfs) == Placement(1, f"the GPU at {GPU} is there")
    assert placement(0, GPU, sysfs).node == 0
    assert placement(0, None, sysfs).node == 0


@pytest.mark.parametrize(
    ("nodes", "gpu_node", "bus_id", "reason"),
    [
        ("0", "0", GPU, "one NUMA node"),
        ("0-1", "-1", GPU, "does not know"),
        ("0-1", "5", GPU, "does not know"),
        ("0-1", None, None, "neither"),
    ],
)
def test_memory_stays_where_the_system_puts_it_for_a_reason(
    tmp_path: Path, nodes: str, gpu_node: str | None, bus_id: str | None, reason: str
) -> None:
    chosen = placement(None, bus_id, host(tmp_path, nodes, gpu_node))
    assert chosen.node is None
    assert reason in chosen.reason


def test_a_node_that_this_host_does_not_have_is_refused_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[0, 1\]") as caught:
        placement(2, GPU, host(tmp_path, "0-1", "1"))
    assert (caught.value.field, caught.value.value) == ("copies.numa_node", 2)


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel does not show where memory is")
def test_the_system_prefers_the_node_for_all_of_the_memory() -> None:
    node = nodes_with_memory()[-1]
    with PageMemory.anonymous(PoolGeometry("kv", 2, 4096, "uint8"), 8) as memory:
        try:
            prefer(memory, node)
        except PermissionError:
            pytest.skip("this container may not place memory")
        memory.view(0, 0)[0] = 1
        policies = {line.split()[0]: line.split()[1] for line in NUMA_MAPS.read_text().splitlines()}
        assert policies[f"{memory.base_address:x}"].startswith("prefer")
        assert policies[f"{memory.base_address:x}"].endswith(f":{node}")


def test_a_node_that_no_host_has_is_an_error_of_the_system() -> None:
    with PageMemory.anonymous(PoolGeometry("kv", 1, 4096, "uint8"), 1) as memory, pytest.raises(OSError, match="\\["):
        prefer(memory, 1000)
