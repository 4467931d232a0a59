"""Every service of the control plane: its stub, its servicer, and what adds that to a server."""

from understudy.protos.daemon_pb2_grpc import DaemonServicer, DaemonStub, add_DaemonServicer_to_server
from understudy.protos.device_server_pb2_grpc import (
    DeviceServerServicer,
    DeviceServerStub,
    add_DeviceServerServicer_to_server,
)
from understudy.protos.hosts_pb2_grpc import (
    DataProbeServicer,
    DataProbeStub,
    HostsServicer,
    HostsStub,
    add_DataProbeServicer_to_server,
    add_HostsServicer_to_server,
)
from understudy.protos.job_link_pb2_grpc import JobLinkServicer, JobLinkStub, add_JobLinkServicer_to_server
from understudy.protos.moves_pb2_grpc import MovesServicer, MovesStub, add_MovesServicer_to_server
from understudy.protos.rendezvous_pb2_grpc import (
    MeetingServicer,
    MeetingStub,
    RendezvousServicer,
    RendezvousStub,
    add_MeetingServicer_to_server,
    add_RendezvousServicer_to_server,
)
from understudy.protos.replica_state_pb2_grpc import (
    ReplicaStateServicer,
    ReplicaStateStub,
    add_ReplicaStateServicer_to_server,
)

__all__ = [
    "DaemonServicer",
    "DaemonStub",
    "DataProbeServicer",
    "DataProbeStub",
    "DeviceServerServicer",
    "DeviceServerStub",
    "HostsServicer",
    "HostsStub",
    "JobLinkServicer",
    "JobLinkStub",
    "MeetingServicer",
    "MeetingStub",
    "MovesServicer",
    "MovesStub",
    "RendezvousServicer",
    "RendezvousStub",
    "ReplicaStateServicer",
    "ReplicaStateStub",
    "add_DaemonServicer_to_server",
    "add_DataProbeServicer_to_server",
    "add_DeviceServerServicer_to_server",
    "add_HostsServicer_to_server",
    "add_JobLinkServicer_to_server",
    "add_MeetingServicer_to_server",
    "add_MovesServicer_to_server",
    "add_RendezvousServicer_to_server",
    "add_ReplicaStateServicer_to_server",
]
