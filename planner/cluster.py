"""The machines that a placement is for: equal nodes of equal devices, with links between them."""

from dataclasses import dataclass

from planner.devices import DeviceSheet, device_sheet
from planner.errors import ClusterError


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` devices each; bandwidths are the sheet's."""

    num_nodes: int
    devices_per_node: int
    device: str

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ClusterError(f"a cluster needs at least one node, not {self.num_nodes}")
        if self.devices_per_node < 1:
            raise ClusterError(
                f"a node needs at least one device, not {self.devices_per_node}: there is nothing "
                "to place an instance on"
            )
        device_sheet(self.device)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def sheet(self) -> DeviceSheet:
        return device_sheet(self.device)
