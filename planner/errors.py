"""The planner's errors: what the world got wrong, in one sentence. The commands exit with 2."""


class PlannerError(Exception):
    """Base of all; the message is for the user as it stands."""

    exit_code = 2


class WorkloadError(PlannerError):
    """A workload that cannot be read, or cannot be."""


class ProfileError(PlannerError):
    """A table or coefficients that cannot be read, or do not cover what is asked."""


class InfeasibleShape(PlannerError):
    """A model does not run in that shape on that device: heads, layers or memory."""


class TargetError(PlannerError):
    """A service-level objective or an attainment target that cannot be."""


class BenchError(PlannerError):
    """The service under test did not answer as it must."""


class ServerFailed(BenchError):
    """The service could not be reached, refuses what a bench must send, or answers nothing."""

    exit_code = 1


class ClusterError(PlannerError):
    """A cluster that cannot be."""
